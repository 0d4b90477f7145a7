"""Two hosts, played by two network namespaces with a link between them: shared memory inside, TCP between, the losses of one process."""

import os
import subprocess
import unittest

from support import SystemTest, TESSERA, environment, metrics


def ip(*arguments):
    return subprocess.run(["ip", *arguments], capture_output=True, text=True)


class Hosts(SystemTest):
    def setUp(self):
        super().setUp()
        self.spaces = [f"tessera-{os.getpid()}-{side}" for side in "ab"]
        links = [f"ts{os.getpid()}{side}" for side in "ab"]
        if any(ip("netns", "add", space).returncode for space in self.spaces):
            self.remove_spaces()
            self.skipTest("network namespaces cannot be made here")
        self.addCleanup(self.remove_spaces)
        ip("link", "add", links[0], "type", "veth", "peer", "name", links[1])
        for number, (space, link) in enumerate(zip(self.spaces, links), 1):
            ip("link", "set", link, "netns", space)
            ip("-n", space, "address", "add", f"10.231.7.{number}/24", "dev", link)
            ip("-n", space, "link", "set", link, "up")
            ip("-n", space, "link", "set", "lo", "up")

    def remove_spaces(self):
        for space in self.spaces:
            ip("netns", "delete", space)

    def train_on(self, hosts, tag, *sets):
        """One rank per entry of `hosts`, in the namespace that it numbers."""
        flags = [x for s in (f"log.dir={self.folder / tag}", *sets) for x in ("--set", s)]
        processes = []
        for rank, host in enumerate(hosts):
            local = [r for r, h in enumerate(hosts) if h == host]
            variables = environment(RANK=str(rank), WORLD_SIZE=str(len(hosts)), LOCAL_RANK=str(local.index(rank)), LOCAL_WORLD_SIZE=str(len(local)),
                                    MASTER_ADDR="10.231.7.1", MASTER_PORT="29400")
            processes.append(subprocess.Popen(["ip", "netns", "exec", self.spaces[host], TESSERA, "train", str(self.recipe), *flags], stdout=subprocess.PIPE,
                                              stderr=subprocess.PIPE, text=True, env=variables))
        try:
            errors = [p.communicate(timeout=90)[1] for p in processes]
        finally:
            for process in processes:
                if process.poll() is None:
                    process.kill()
                    process.communicate()
        for process, error in zip(processes, errors):
            self.assertEqual(process.returncode, 0, error[-3000:])
        return metrics(self.folder / tag)

    def test_losses_are_those_of_one_process(self):
        _, one = self.train("one", sets=["run.steps=6"])
        for hosts in ((0, 0, 1, 1), (0, 1, 0)):
            tag = "".join(map(str, hosts))
            self.assert_close_losses(self.train_on(hosts, tag, "run.steps=6"), metrics(one), 5e-6)

    def test_shm_alone_says_that_it_needs_one_host(self):
        with self.assertRaisesRegex(AssertionError, "shm|host"):
            self.train_on((0, 1), "log", "comm.backend=shm", "comm.timeout_s=20")


if __name__ == "__main__":
    unittest.main()
