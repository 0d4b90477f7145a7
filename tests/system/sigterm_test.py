"""SIGTERM to the launcher or to one rank: all ranks stop after the same step, save, and end with 0; the resumed run equals one that was never stopped."""

import os
import pathlib
import signal
import subprocess
import time
import unittest

from processes import alive, children, rank_of
from support import SystemTest, TESSERA, environment, metrics, safetensors

KEYS = ("step", "loss", "grad_norm", "lr", "tokens")


def essence(lines):
    return [{k: line[k] for k in KEYS} for line in lines]


class Sigterm(SystemTest):
    def start(self, nproc, *sets, inject="", steps=100000, until=3, launcher=()):
        """A run that has finished `until` steps (0: has begun the first; -1: has processes for its ranks). Returns process and log folder."""
        log = self.folder / "run"
        flags = [x for s in (f"log.dir={log}", f"run.steps={steps}", "optim.schedule=constant", *sets) for x in ("--set", s)]
        command = [*launcher, TESSERA, "train", self.recipe, *([] if launcher else ["--nproc", str(nproc)]), *flags, *(["--inject", inject] if inject else [])]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment(), start_new_session=True)
        self.addCleanup(lambda: process.poll() is None and process.kill())
        deadline = time.time() + 60
        while time.time() < deadline and not self.under_way(process, nproc, log, until):
            self.assertIsNone(process.poll(), process.stderr.read() if process.poll() is not None else "")
            time.sleep(0.02)
        return process, log

    def under_way(self, process, nproc, log, until):
        if until < 0:
            return len(children(process.pid)) == nproc
        file = log / "metrics.jsonl"
        return file.exists() and file.read_text().count("\n") >= until

    def ranks(self, process):
        return {rank_of(p): p for p in children(process.pid)}

    def end(self, process, expect, within=20):
        workers = children(process.pid)
        began = time.time()
        try:
            _, stderr = process.communicate(timeout=within)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            self.fail(f"still running {within} s later")
        self.assertEqual(process.returncode, expect, stderr)
        self.assertFalse([p for p in workers if alive(p)], "orphans")
        return stderr, time.time() - began

    def newest(self):
        folders = sorted(f.name for f in (self.folder / "ckpt").iterdir())
        self.assertTrue(folders, "nothing was saved")
        return int(folders[-1].rpartition("-")[2])

    def check_resume(self, nproc, stopped_at):
        """Two more steps after the stop equal those of a run from the start."""
        last = stopped_at + 2
        sets = [f"run.steps={last}", "optim.schedule=constant"]
        dump = ["--dump-step", last, "--dump-dir"]
        _, whole = self.train("whole", *dump, self.folder / "whole-dump", nproc=nproc, sets=sets)
        self.train("run", *dump, self.folder / "dump", nproc=nproc, sets=[*sets, f"checkpoint.dir={self.folder / 'ckpt'}", "checkpoint.resume=latest"])
        self.assertEqual(essence(metrics(self.folder / "run")), essence(metrics(whole)))
        weights, expected = (safetensors(self.folder / f / "weights.safetensors") for f in ("dump", "whole-dump"))
        self.assert_equal_tensors(weights, expected)

    def check_stop(self, nproc, whom, resume=True):
        process, log = self.start(nproc, f"checkpoint.dir={self.folder / 'ckpt'}")
        target = process.pid if whom is None else self.ranks(process)[whom]
        os.kill(target, signal.SIGTERM)
        stderr, took = self.end(process, 0)
        self.assertLess(took, 5, "longer than the grace time")
        stopped_at = len(metrics(log))
        self.assertEqual(self.newest(), stopped_at, "the step after which all stopped was not saved")
        who = "rank [0-9]+" if whom is None and nproc > 1 else f"rank {whom or 0}"
        self.assertRegex(stderr, rf"stopped after step {stopped_at} in .*: {who} got SIGTERM; saved to {self.folder / 'ckpt'}")
        if resume:
            self.check_resume(nproc, stopped_at)

    def test_alone(self):
        self.check_stop(1, None)

    def test_the_launcher(self):
        self.check_stop(2, None)

    def test_the_first_rank(self):
        self.check_stop(2, 0, resume=False)

    def test_the_last_of_three_ranks(self):
        self.check_stop(3, 2)

    def test_asking_again_while_the_launcher_is_done_is_no_failure(self):
        up = [self.folder / f"up{rank}" for rank in (0, 1)]
        rank = f"trap 'exit 0' TERM; touch {self.folder}/up$RANK; while true; do sleep 0.02; done"
        for _ in range(3):
            process = subprocess.Popen([TESSERA, "run", "--nproc-per-node", "2", "--", "sh", "-c", rank], env=environment(), stderr=subprocess.PIPE, text=True)
            self.addCleanup(lambda process=process: process.poll() is None and process.kill())
            deadline = time.time() + 60
            while time.time() < deadline and not all(file.exists() for file in up):
                time.sleep(0.02)
            process.send_signal(signal.SIGTERM)
            while process.poll() is None and time.time() < deadline:
                process.send_signal(signal.SIGINT)
                time.sleep(0.002)
            said = process.communicate()[1]
            self.assertEqual(process.returncode, 0, said)
            for file in up:
                file.unlink()

    def test_nothing_to_save_to_is_said(self):
        process, _ = self.start(2)
        os.kill(self.ranks(process)[1], signal.SIGTERM)
        stderr, _ = self.end(process, 0)
        self.assertIn("rank 1 got SIGTERM; nothing was saved, as there is no checkpoint.dir", stderr)

    def test_control_c_alone_saves(self):
        process, log = self.start(1, f"checkpoint.dir={self.folder / 'ckpt'}")
        process.send_signal(signal.SIGINT)
        self.assertIn("got SIGINT; saved", self.end(process, 0)[0])
        self.assertEqual(self.newest(), len(metrics(log)))

    def test_a_terminal_that_hangs_up_is_said(self):
        process, _ = self.start(1, until=0)
        process.send_signal(signal.SIGHUP)
        self.assertIn("tessera: interrupted by SIGHUP (hangup)", self.end(process, 1)[0])
        ignored = subprocess.Popen([TESSERA, "plan", self.recipe], stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment(),
                                   preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN))  # as nohup does
        while ignored.poll() is None:
            ignored.send_signal(signal.SIGHUP)
            time.sleep(0.01)
        self.assertEqual(ignored.communicate()[1], "")
        self.assertEqual(ignored.returncode, 0)

    def test_a_launcher_that_meets_nobody(self):
        # An address of documentation: nobody answers there.
        command = [TESSERA, "run", "--nnodes=2", "--nproc-per-node=1", "--rdzv-id=1", "--rdzv-endpoint=192.0.2.77:29400", "--", "true"]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment(), start_new_session=True)
        self.addCleanup(lambda: process.poll() is None and process.kill())
        time.sleep(1)
        process.send_signal(signal.SIGTERM)
        stderr, _ = self.end(process, 1)
        self.assertIn("interrupted by SIGTERM (terminated)", stderr.splitlines()[-1])

    def test_a_validation_that_outlasts_the_grace_time_is_given_up(self):
        held_out = self.folder / "long.txt"
        held_out.write_text((self.folder / "held_out.txt").read_text() * 1000)
        process, log = self.start(2, f"checkpoint.dir={self.folder / 'ckpt'}", "run.validate_every=1", f'data.validation_files=["{held_out}"]', until=1)
        time.sleep(1)
        os.kill(self.ranks(process)[1], signal.SIGTERM)
        stderr, took = self.end(process, 0)
        self.assertLess(took, 5, "longer than the grace time")
        self.assertRegex(stderr, rf"stopped after step 1 in .*: rank 1 got SIGTERM; saved to {self.folder / 'ckpt'}")
        self.assertEqual(self.newest(), 1)
        self.assertEqual((log / "validation.jsonl").read_text(), "")

    def test_every_process_of_the_job_at_once(self):
        process, log = self.start(2, f"checkpoint.dir={self.folder / 'ckpt'}")
        for pid in (*children(process.pid), process.pid):  # as a service manager's stop does; the launcher tells its ranks once more
            os.kill(pid, signal.SIGTERM)
        self.assertIn("got SIGTERM; saved to", self.end(process, 0)[0])
        self.assertEqual(self.newest(), len(metrics(log)))

    def test_before_the_first_step(self):
        process, _ = self.start(2, until=-1)
        process.terminate()
        stderr, took = self.end(process, 1)
        self.assertLess(took, 5)
        self.assertIn("SIGTERM", stderr.strip().splitlines()[-1])

    def test_a_second_signal_does_not_wait_for_the_step(self):
        process, _ = self.start(1, "run.threads=1", "batch.global_size=3000", until=0)  # a step of some ten seconds
        process.terminate()
        time.sleep(1.2)  # within a second it would be the same request
        process.terminate()
        _, took = self.end(process, -signal.SIGTERM)
        self.assertLess(took, 2)

    def test_a_step_that_outlasts_the_grace_time_is_ended(self):
        launcher = [TESSERA, "run", "--standalone", "--nproc-per-node", "2", "--grace", "2", "--"]
        process, log = self.start(2, inject="rank=1,op=all_reduce,count=8,do=delay:60s", launcher=launcher)
        steps = -1
        while steps != (steps := len(metrics(log))):
            time.sleep(1)
        process.terminate()
        stderr, took = self.end(process, 1)
        self.assertLess(took, 10)
        self.assertIn("SIGTERM", stderr.strip().splitlines()[-1])


if __name__ == "__main__":
    unittest.main()
