"""Several hosts on one machine: network namespaces that a bridge joins, and links that can be cut. Needs root and `ip` (Debian: iproute2)."""

import itertools
import os
import shutil
import subprocess

_numbers = itertools.count()


def ip(*arguments):
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


def why_not():
    """Why namespaces cannot be made here; None where they can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "there is no `ip` in PATH (Debian: iproute2)"
    name = f"tessera-{os.getpid()}-try"
    try:
        ip("netns", "add", name)
    except subprocess.CalledProcessError as error:
        return f"`ip netns add` is refused: {error.stderr.strip()}"
    try:
        ip("-n", name, "link", "add", "bridge", "type", "bridge")
        return None
    except subprocess.CalledProcessError as error:
        return f"a bridge is refused: {error.stderr.strip()}"
    finally:
        ip("netns", "delete", name)


class Host:
    """A namespace with its own loopback and one link to the others."""

    def __init__(self, network, index):
        self.namespace, self.port, self.network = f"{network.name}-{index}", f"port{index}", network
        self.address, self.address6 = f"10.77.0.{index + 1}", f"fd77::{index + 1}"
        ip("netns", "add", self.namespace)
        ip("-n", self.namespace, "link", "set", "lo", "up")
        ip("-n", network.name, "link", "add", self.port, "type", "veth", "peer", "name", "eth0", "netns", self.namespace)
        ip("-n", network.name, "link", "set", self.port, "master", "bridge", "up")
        ip("-n", self.namespace, "address", "add", f"{self.address}/24", "dev", "eth0")
        ip("-n", self.namespace, "address", "add", f"{self.address6}/64", "dev", "eth0", "nodad")
        ip("-n", self.namespace, "link", "set", "eth0", "up")

    def cut(self):
        """As when the cable is pulled at the switch: whatever is sent is lost, and nobody is told."""
        ip("-n", self.network.name, "link", "set", self.port, "nomaster")

    def heal(self):
        ip("-n", self.network.name, "link", "set", self.port, "master", "bridge")

    def command(self, *arguments):
        """To be started as it is: the process is the program's own."""
        return ["ip", "netns", "exec", self.namespace, *map(str, arguments)]


class Network:
    """`hosts` namespaces, and one for the bridge, so that nothing of this machine's own network is touched. Use it in a `with`."""

    def __init__(self, hosts):
        self.name = f"tessera-{os.getpid()}-{next(_numbers)}"
        self.hosts = []
        self._count = hosts

    def __enter__(self):
        try:
            ip("netns", "add", self.name)
            ip("-n", self.name, "link", "add", "bridge", "type", "bridge")
            ip("-n", self.name, "link", "set", "bridge", "up")
            for index in range(self._count):
                self.hosts.append(Host(self, index))
        except subprocess.CalledProcessError:
            self.close()
            raise
        return self

    def __exit__(self, *_):
        self.close()

    def close(self):
        """A namespace takes its links with it. What still runs in one keeps it alive, so processes have to be ended before."""
        listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout.split("\n")
        for line in listed:
            name = line.split(" ")[0]
            if name == self.name or name.startswith(self.name + "-"):
                subprocess.run(["ip", "netns", "delete", name], capture_output=True)
