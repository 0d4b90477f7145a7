"""A page in headless Chromium, driven over the pipe of its DevTools protocol: what is drawn, what goes wrong, and what it asks the network for."""

import base64
import json
import os
import pathlib
import shutil
import subprocess
import tempfile
import time

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")


def executable():
    """Path of a Chromium; None where there is none."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Page:
    """A file, opened without a network. `problems`: what the console and the page's scripts complained of; `requests`: all that was asked for but the file."""

    def __init__(self, path, width=1200, dark=False, timeout=120):
        self.url = pathlib.Path(path).resolve().as_uri()
        self.problems, self.requests = [], []
        self.deadline = time.monotonic() + timeout
        self.profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        commands, self.write_to = os.pipe()
        self.read_from, answers = os.pipe()
        flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--disable-extensions", "--disable-background-networking",
                 "--disable-component-update", "--no-first-run", "--host-resolver-rules=MAP * ~NOTFOUND", "--hide-scrollbars", "--remote-debugging-pipe",
                 f"--user-data-dir={self.profile.name}", f"--window-size={width},900", "about:blank"]

        def hand_over():  # by number, as Chromium expects them
            spare = [os.dup(commands), os.dup(answers)]
            os.dup2(spare[0], 3)
            os.dup2(spare[1], 4)

        self.process = subprocess.Popen([executable(), *flags], preexec_fn=hand_over, pass_fds=(3, 4), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                                        stderr=subprocess.DEVNULL)
        os.close(commands)
        os.close(answers)
        self.number, self.buffer, self.session = 0, b"", None
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.ask(f"{domain}.enable")
        if dark:
            self.ask("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark"}])
        self.loaded = False
        self.ask("Page.navigate", url=self.url)
        while not self.loaded:
            self.take()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.terminate()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        os.close(self.write_to)
        os.close(self.read_from)
        self.profile.cleanup()

    def take(self):
        """The next message; those that tell of the page are taken down."""
        while b"\0" not in self.buffer:
            if time.monotonic() > self.deadline:
                raise TimeoutError("Chromium does not answer")
            more = os.read(self.read_from, 1 << 20)
            if not more:
                raise RuntimeError("Chromium ended")
            self.buffer += more
        text, _, self.buffer = self.buffer.partition(b"\0")
        message = json.loads(text)
        method, told = message.get("method"), message.get("params", {})
        if method == "Page.loadEventFired":
            self.loaded = True
        elif method == "Runtime.exceptionThrown":
            self.problems.append(told["exceptionDetails"]["text"])
        elif method == "Log.entryAdded" and told["entry"]["level"] in ("warning", "error"):
            self.problems.append(told["entry"]["text"])
        elif method == "Runtime.consoleAPICalled" and told["type"] in ("warning", "error", "assert"):
            self.problems.append(json.dumps(told["args"]))
        elif method == "Network.requestWillBeSent" and told["request"]["url"] != self.url and not told["request"]["url"].startswith("data:"):
            self.requests.append(told["request"]["url"])
        return message

    def ask(self, method, **parameters):
        self.number += 1
        message = {"id": self.number, "method": method, "params": parameters}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.write_to, json.dumps(message).encode() + b"\0")
        while (answer := self.take()).get("id") != message["id"]:
            pass
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']}")
        return answer["result"]

    def evaluate(self, expression):
        """The value of a JavaScript expression in the page."""
        result = self.ask("Runtime.evaluate", expression=expression, returnByValue=True)
        if "exceptionDetails" in result:
            raise RuntimeError(result["exceptionDetails"]["text"])
        return result["result"].get("value")

    def screenshot(self, path):
        """The whole page, as PNG."""
        shot = self.ask("Page.captureScreenshot", captureBeyondViewport=True, format="png")
        pathlib.Path(path).write_bytes(base64.b64decode(shot["data"]))
