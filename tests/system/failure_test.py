"""A rank that dies ends all ranks promptly with one sentence; Ctrl-C ends all, once."""

import os
import pathlib
import re
import resource
import shutil
import signal
import subprocess
import time
import unittest

from processes import alive, children, rank_of
from support import SystemTest, TESSERA, environment, run


class Failure(SystemTest):
    def start(self, nproc=2):
        log = self.folder / f"log{time.monotonic_ns()}"
        process = subprocess.Popen(
            [TESSERA, "train", self.recipe, "--nproc", str(nproc), "--set", f"log.dir={log}", "--set", "run.steps=100000"],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment(), start_new_session=True)
        deadline = time.time() + 60
        while time.time() < deadline and not ((log / "metrics.jsonl").exists() and (log / "metrics.jsonl").read_text().count("\n") > 3):
            self.assertIsNone(process.poll(), process.stderr.read() if process.poll() is not None else "")
            time.sleep(0.1)
        return process

    def end(self, process, within):
        began = time.time()
        try:
            _, stderr = process.communicate(timeout=within)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            self.fail(f"still running {within} s later")
        return stderr, time.time() - began

    def test_a_killed_rank_ends_all_and_is_named(self):
        for doomed in (0, 1):
            process = self.start()
            workers = children(process.pid)
            self.assertEqual(len(workers), 2)
            os.kill(next(p for p in workers if rank_of(p) == doomed), signal.SIGKILL)
            stderr, _ = self.end(process, 10)
            self.assertEqual(process.returncode, 1, stderr)
            last = stderr.strip().splitlines()[-1]
            self.assertIn(f"rank {doomed}", last)
            self.assertIn("SIGKILL", last)
            self.assertFalse([p for p in workers if alive(p)], "orphans")

    def test_control_c_ends_all_once(self):
        process = self.start()
        workers = children(process.pid)
        os.killpg(process.pid, signal.SIGINT)
        stderr, _ = self.end(process, 10)
        self.assertNotEqual(process.returncode, 0)
        self.assertNotIn("frame #", stderr)
        self.assertNotIn("Traceback", stderr)
        self.assertLess(len([line for line in stderr.splitlines() if "interrupt" in line.lower()]), 2)
        self.assertFalse([p for p in workers if alive(p)], "orphans")

    def test_control_c_is_answered_from_the_start(self):
        """Also while libraries are loaded, and before any rank is started."""
        self.assertNotRegex(pathlib.Path(TESSERA).read_bytes(), rb"libtorch\w*\.so", "what takes long to load is loaded after that")
        for nproc, delay in ((1, 0), (1, 0.03), (2, 0), (2, 0.1)):
            process = subprocess.Popen([TESSERA, "train", self.recipe, "--nproc", str(nproc), "--set", f"log.dir={self.folder / 'early'}"],
                                       stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment(), start_new_session=True)
            caught = re.compile(r"^SigCgt:\s*([0-9a-f]+)$", re.MULTILINE)
            deadline = time.time() + 10
            while not int(caught.search(pathlib.Path(f"/proc/{process.pid}/status").read_text())[1], 16) & (1 << (signal.SIGINT - 1)):
                self.assertLess(time.time(), deadline)
            time.sleep(delay)
            process.send_signal(signal.SIGINT)
            stderr, _ = self.end(process, 10)
            self.assertEqual(process.returncode, 1, stderr)
            self.assertEqual(len([line for line in stderr.splitlines() if "SIGINT" in line]), 1, stderr)
            self.assertIn("interrupted by SIGINT", stderr.strip().splitlines()[-1])

    def test_killing_the_launcher_leaves_no_orphan(self):
        process = self.start()
        workers = children(process.pid)
        process.kill()
        process.communicate()
        deadline = time.time() + 10
        while time.time() < deadline and any(alive(p) for p in workers):
            time.sleep(0.1)
        self.assertFalse([p for p in workers if alive(p)], "orphans")

    @unittest.skipUnless(os.geteuid() == 0 and shutil.which("setpriv"), "needs a user of its own, whose threads are counted")
    def test_threads_that_cannot_be_started(self):
        """Each ends by itself and names the limit, wherever the system refuses the next thread or process: in our code, or in a library's."""
        capabilities = "+dac_override,+dac_read_search"
        user = ["setpriv", "--inh-caps", capabilities, "--ambient-caps", capabilities, "--reuid", "23457", "--regid", "23457", "--clear-groups", "--"]
        for limit, *command in ((4, "verify", self.recipe, "--mesh", "dp_replicate=4"), (5, "run", "--nproc-per-node", "2", "--", "/bin/true"),
                                (2, "train", self.recipe, "--set", "run.threads=4", "--set", f"log.dir={self.folder / 'log'}")):
            with self.subTest(command[0]):
                done = subprocess.run([*user, TESSERA, *map(str, command)], capture_output=True, text=True, timeout=60, env=environment(OMP_NUM_THREADS="4"),
                                      preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NPROC, (limit, limit)))
                self.assertEqual(done.returncode, 1, done.stderr)
                self.assertIn("ulimit -u", done.stderr.strip().splitlines()[-1])
                self.assertNotIn("terminate called", done.stderr)

    def test_variables_of_a_launcher_that_contradict_each_other(self):
        for variables, word in (({"RANK": "2", "WORLD_SIZE": "2"}, "RANK"), ({"RANK": "x", "WORLD_SIZE": "2"}, "RANK"),
                                ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}, "MASTER_ADDR")):
            done = run("train", self.recipe, "--set", f"log.dir={self.folder / 'log'}", **variables)
            self.assertIn(word, self.refusal(done))
        joined = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
        self.assertIn("--nproc", self.refusal(run("train", self.recipe, "--nproc", 3, "--set", f"log.dir={self.folder / 'log'}", **joined)))


if __name__ == "__main__":
    unittest.main()
