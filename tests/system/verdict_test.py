"""What flight records say of a job that hung, was killed, or went well: at its end, and later by `tessera inspect record`."""

import json
import os
import re
import signal
import subprocess
import time
import unittest

from support import SystemTest, TESSERA, environment, run


class Verdict(SystemTest):
    def hang(self, nproc, count):
        """Trains with rank 1 hanging in its `count`-th all_reduce; returns (process, log folder, seconds)."""
        began = time.monotonic()
        done, log = self.train("hang", "--inject", f"rank=1,op=all_reduce,count={count},do=hang", nproc=nproc, sets=("comm.timeout_s=5",), expect=1)
        return done, log, time.monotonic() - began

    def records(self, log, *flags):
        done = run("inspect", "record", log / "record", *flags)
        self.assertEqual(done.returncode, 0, done.stderr)
        return done.stdout

    def start(self, *sets):
        log = self.folder / "log"
        flags = [x for s in (f"log.dir={log}", "run.steps=100000", *sets) for x in ("--set", s)]
        process = subprocess.Popen([TESSERA, "train", self.recipe, "--nproc", "2", *flags], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
                                   env=environment(), start_new_session=True)
        self.addCleanup(process.stderr.close)
        deadline = time.time() + 60
        while not ((log / "metrics.jsonl").exists() and (log / "metrics.jsonl").read_text().count("\n") > 3):
            self.assertIsNone(process.poll())
            self.assertLess(time.time(), deadline)
            time.sleep(0.1)
        return process, log

    def test_a_hung_rank_is_named_at_the_end_and_later(self):
        done, log, seconds = self.hang(nproc=2, count=12)
        *_, titles, first, second, last = done.stderr.splitlines()
        match = re.fullmatch(r"rank 1 never entered all_reduce #(\d+) of (\S+) \(ddp\.bucket\); rank 0 waits [56] s", last)
        self.assertTrue(match, done.stderr)
        self.assertLess(seconds, 5 + 10 + 5)  # the timeout, the end, and the time before the hang
        self.assertTrue(titles.startswith("rank  last entered"), done.stderr)
        self.assertRegex(first, rf"^ +0  all_reduce #{match[1]} of {match[2]} \[\d+\] float32 +failed")
        self.assertRegex(second, r"^ +1  \S+ #\d+ of \S+ .* outside")

        later = self.records(log).splitlines()
        self.assertEqual(later[0], last)
        self.assertEqual(len(later), 4)
        found = json.loads(self.records(log, "--json", "--calls", "5"))
        self.assertEqual(found["verdict"], {"kind": "never_entered", "sentence": last, "culprits": [1], "waiting": [0]})
        self.assertEqual([rank["rank"] for rank in found["ranks"]], [0, 1])
        self.assertEqual([len(rank["calls"]) for rank in found["ranks"]], [5, 5])
        waited = found["ranks"][0]["calls"][-1]
        self.assertEqual((waited["op"], waited["sequence"], waited["state"], waited["site"]), ("all_reduce", int(match[1]), "failed", "ddp.bucket"))
        self.assertEqual(found["ranks"][1]["groups"][0]["name"], "world")

    def test_all_who_wait_are_named_together(self):
        done, _, _ = self.hang(nproc=3, count=7)
        self.assertRegex(done.stderr.splitlines()[-1], r"^rank 1 never entered all_reduce #\d+ of \S+ \(ddp\.bucket\); ranks 0, 2 wait [56] s$")

    # The sixth send of a rank in the first step: stage 1 sends a gradient behind each backward, stage 0 its output behind each forward.
    STAGES = ("mesh.pp=2", "comm.timeout_s=4", "run.steps=3")

    def hang_of_a_stage(self, rank, action):
        done, log = self.train("hang", "--inject", f"rank={rank},op=send,count=6,do=hang", nproc=2, sets=self.STAGES, expect=1)
        last = done.stderr.splitlines()[-1]
        never = rf"rank {rank} never entered send #1 to rank {1 - rank} of \S+ \(tag \d+\) \(stage \d, \w+ of micro-batch 5\)"
        self.assertRegex(last, rf"^{never}; rank {1 - rank} waits [45] s; rank {rank} is at {action}$")
        self.assertEqual(self.records(log).splitlines()[0], last)
        found = json.loads(self.records(log, "--json"))["ranks"]
        self.assertEqual(found[rank]["place"], action)
        waits = found[1 - rank]["calls"][-1]["entered_s"]
        self.assertLess(max(each["seen_s"] for each in found) - waits, 4 + 10)  # both have ended by then

    def test_a_first_stage_that_hangs_is_named_with_its_micro_batch(self):
        self.hang_of_a_stage(0, "stage 0, forward of micro-batch 5")

    def test_a_last_stage_that_hangs_is_named_with_its_micro_batch(self):
        self.hang_of_a_stage(1, "stage 1, backward of micro-batch 5")

    def test_a_stage_that_fails_is_named_with_its_micro_batch(self):
        done, _ = self.train("error", "--inject", "rank=1,op=send,count=6,do=error", nproc=2, sets=self.STAGES, expect=1)
        self.assertIn("rank 1 failed with exit code 1: stage 1, backward of micro-batch 5: ", done.stderr.splitlines()[-1])

    def test_a_killed_rank_leaves_its_record(self):
        process, log = self.start()
        # Its record says which process it was; a record can be read while it is written.
        pid = json.loads(self.records(log, "--json"))["ranks"][1]["pid"]
        os.kill(pid, signal.SIGKILL)
        _, stderr = process.communicate(timeout=30)
        self.assertEqual(process.returncode, 1, stderr)
        self.assertIn("rank 1 was ended by SIGKILL", stderr.splitlines()[-1])
        self.assertIn("\nrank  last entered", stderr)
        found = json.loads(self.records(log, "--json", "--calls", "20000"))["ranks"][1]
        self.assertEqual(found["pid"], pid)
        self.assertFalse(found["closed"])
        numbers = [call["number"] for call in found["calls"]]
        self.assertEqual(numbers, list(range(numbers[0], found["total_calls"])))
        self.assertTrue(all(call["state"] == "completed" for call in found["calls"][:-4]))

    def test_a_stopped_rank_gives_no_sign_of_life(self):
        process, log = self.start("comm.timeout_s=6")
        pid = json.loads(self.records(log, "--json"))["ranks"][1]["pid"]
        os.kill(pid, signal.SIGSTOP)
        _, stderr = process.communicate(timeout=40)
        self.assertEqual(process.returncode, 1, stderr)
        last = stderr.splitlines()[-1]
        self.assertRegex(last, r"^rank 1 (never entered|gave no sign of life)")
        self.assertRegex(last, r"rank 1 .*gave no sign of life for the last [4567] s")
        self.assertRegex(last, r"rank 0 waits [567] s")

    def test_a_run_that_went_well_is_said_to_have(self):
        _, log = self.train("well", nproc=2, sets=("run.steps=3",))
        sentence, *table = self.records(log).splitlines()
        self.assertEqual(sentence, "no rank waits: all have left the world")
        self.assertEqual(len(table), 3)
        for line in table[1:]:
            self.assertIn("left the world", line)
        # The next run starts its records anew.
        before = json.loads(self.records(log, "--json"))["ranks"][0]["pid"]
        self.train("well", nproc=2, sets=("run.steps=4",))
        self.assertNotEqual(json.loads(self.records(log, "--json"))["ranks"][0]["pid"], before)

    def test_what_is_no_record_is_refused(self):
        self.assertIn("No such file", self.refusal(run("inspect", "record", self.folder / "none")))
        self.assertIn("holds no flight record", self.refusal(run("inspect", "record", self.folder)))
        file = self.folder / "rank_0.bin"
        file.write_bytes(b"something else" * 100)
        refusal = self.refusal(run("inspect", "record", self.folder))
        self.assertIn(str(file), refusal)
        self.assertIn("offset 0", refusal)
        file.write_bytes(b"TSRFLGHT")
        self.assertIn("offset 8", self.refusal(run("inspect", "record", self.folder)))
        self.assertIn("record", self.refusal(run("inspect")))
        self.assertIn("such file", self.refusal(run("inspect", self.folder / "none")))


if __name__ == "__main__":
    unittest.main()
