"""Every fault that --inject knows, in a training run: it ends promptly with one sentence, leaves nothing behind, and loses nothing that was saved."""

import os
import pathlib
import signal
import subprocess
import time
import unittest

from processes import alive, children
from support import SystemTest, TESSERA, environment, metrics, run, safetensors

TIMEOUT_S = 3  # of a collective
KEYS = ("step", "loss", "grad_norm", "lr", "tokens")


def segments():
    """Names of ours in /dev/shm."""
    return {entry.name for entry in pathlib.Path("/dev/shm").iterdir() if "tessera" in entry.name}


class Faults(SystemTest):
    def inject(self, fault, *sets, within, expect=1, nproc=2, tag="log"):
        """Trains under `fault` and checks what holds for each of them. Returns the last line of standard error, the log folder and the seconds it took."""
        log, before, began = self.folder / tag, segments(), time.time()
        flags = [x for s in (f"log.dir={log}", f"comm.timeout_s={TIMEOUT_S}", *sets) for x in ("--set", s)]
        process = subprocess.Popen([TESSERA, "train", self.recipe, "--nproc", str(nproc), *flags, "--inject", fault],
                                   stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment(), start_new_session=True)
        workers = []
        while process.poll() is None and len(workers) < nproc and time.time() < began + 20:
            workers = children(process.pid)
            time.sleep(0.02)
        self.assertEqual(len(workers), nproc)
        try:
            _, stderr = process.communicate(timeout=within + 20)  # a machine full of tests starts slowly
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            self.fail(f"{fault}: still running")
        self.assertEqual(process.returncode, expect, stderr)
        deadline = time.time() + 5
        while any(alive(p) for p in workers) and time.time() < deadline:
            time.sleep(0.05)
        self.assertFalse([p for p in workers if alive(p)], "orphans")
        self.assertLessEqual(segments(), before, "a segment of shared memory was left")
        self.assertNotIn("frame #", stderr)
        last = stderr.strip().splitlines()[-1]
        if expect == 1:
            self.assertIn("rank 1", last)
            self.assertLess(len(last), 400)
            # Since the last step that was finished, not since the start.
            self.assertLess(time.time() - (log / "metrics.jsonl").stat().st_mtime, within, f"{fault}: too long after the last step")
        return last, log

    def test_a_killed_rank(self):
        last, log = self.inject("rank=1,op=all_reduce,count=9,do=kill", within=8)
        self.assertIn("SIGKILL", last)
        self.assertGreater(len(metrics(log)), 2)

    def test_a_stopped_rank(self):
        last, _ = self.inject("rank=1,op=all_reduce,count=9,do=stop", within=TIMEOUT_S + 10)
        self.assertRegex(last, "rank 1 never entered all_reduce #[0-9]+ of ")

    def test_a_hung_rank(self):
        last, _ = self.inject("rank=1,op=all_reduce,count=9,do=hang", within=TIMEOUT_S + 10)
        self.assertRegex(last, "rank 1 never entered all_reduce #[0-9]+ of ")
        self.assertIn("rank 0 waits", last)

    def test_a_rank_that_fails(self):
        self.inject("rank=1,op=all_gather,count=9,do=error", within=8)  # the first of them compare the replicas and plan the buckets

    def test_a_mismatched_collective_under_the_check(self):
        last, _ = self.inject("rank=1,op=all_reduce,count=9,do=skip", "comm.check=true", within=8)
        self.assertIn("rank 0", last)
        self.assertIn("all_reduce", last)
        self.assertIn("all_gather", last, "what rank 1 asked for instead")

    def test_a_mismatched_collective_without_it(self):
        self.inject("rank=1,op=all_reduce,count=9,do=skip", within=TIMEOUT_S + 10)

    def test_corruption_is_silent(self):
        _, honest = self.train("honest", nproc=2)
        _, log = self.inject("rank=0,op=all_reduce,count=9,do=corrupt", expect=0, within=20)
        losses, expected = metrics(log), metrics(honest)
        self.assertEqual(len(losses), len(expected))
        same = [a["loss"] == b["loss"] and a["grad_norm"] == b["grad_norm"] for a, b in zip(losses, expected)]
        first = same.index(False)
        self.assertTrue(0 < first < len(same) - 1, f"from step {first + 1}")

    def test_a_fault_that_never_happens_is_said(self):
        done = run("train", self.recipe, "--nproc", 2, "--set", f"log.dir={self.folder / 'calm'}", "--set", "run.steps=4", "--inject",
                   "rank=1,op=send,do=kill")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("rank=1,op=send,count=1,do=kill never happened: rank 1 made 0 such calls", done.stderr)

    def test_what_ranks_tell_each_other_is_looked_at_first(self):
        done = run("train", self.recipe, "--nproc", 2, "--set", f"log.dir={self.folder / 'begin'}", "--set", "comm.timeout_s=5", "--inject", "rank=1,do=skip")
        self.assertEqual(done.returncode, 1, done.stderr)
        self.assertRegex(done.stderr.strip().splitlines()[-1], "of group world (says of its state arrived damaged|tells of something else)")

    def test_a_delay_changes_no_number_and_is_seen(self):
        _, honest = self.train("honest", nproc=2)
        _, log = self.inject("rank=1,op=all_reduce,count=1+,do=delay:40ms", expect=0, within=30)
        for ours, theirs in zip(metrics(log), metrics(honest), strict=True):
            self.assertEqual([ours[k] for k in KEYS], [theirs[k] for k in KEYS])
        slow = [line for line in metrics(log) if line["slowest_rank"] == 1 and line["slowest_ratio"] > 1.2]
        self.assertGreater(len(slow), 15)

    def test_a_full_stop_loses_nothing_that_was_saved(self):
        sets = [f"checkpoint.dir={self.folder / 'ckpt'}", "checkpoint.every=4"]
        whole, log = self.train("whole", "--dump-step", 20, "--dump-dir", self.folder / "want", nproc=2)
        self.inject("rank=1,op=all_reduce,count=11,do=kill", *sets, within=8, tag="part")
        newest = max(int(f.name.rpartition("-")[2]) for f in (self.folder / "ckpt").glob("step-*"))
        self.assertGreaterEqual(newest, 4)
        self.assertGreaterEqual(len(metrics(self.folder / "part")), newest)
        self.train("part", "--dump-step", 20, "--dump-dir", self.folder / "got", nproc=2, sets=[*sets, "checkpoint.resume=latest"])
        self.assertEqual([[line[k] for k in KEYS] for line in metrics(self.folder / "part")], [[line[k] for k in KEYS] for line in metrics(log)])
        got, want = (safetensors(self.folder / f / "weights.safetensors") for f in ("got", "want"))
        self.assert_equal_tensors(got, want)

    def test_refusals_come_before_any_rank(self):
        for fault, part in (("rank=7,do=kill", "rank=7"), ("rank=1,do=explode", "do=explode"), ("rank=1,op=allreduce,do=kill", "op=allreduce"),
                            ("rank=1,count=0,do=kill", "count=0"), ("do=kill", "rank=1"), (";", "';'")):
            refused = self.refusal(run("train", self.recipe, "--nproc", 2, "--set", f"log.dir={self.folder / 'none'}", "--inject", fault))
            self.assertIn("--inject", refused)
            self.assertIn(part, refused)
        refused = self.refusal(run("train", self.recipe, "--nproc", 2, "--set", f"log.dir={self.folder / 'none'}", TESSERA_INJECT="rank=1,do=explode"))
        self.assertIn("TESSERA_INJECT", refused)
        self.assertIn("--nproc", self.refusal(run("train", self.recipe, "--set", f"log.dir={self.folder / 'none'}", "--inject", "rank=0,do=kill")))
        self.assertFalse((self.folder / "none").exists(), "something was started")


if __name__ == "__main__":
    unittest.main()
