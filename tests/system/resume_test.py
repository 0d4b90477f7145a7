"""Stopping and resuming equals never having stopped."""

import json
import re
import shutil
import unittest

from support import SystemTest, metrics, run, safetensors

KEYS = ("step", "loss", "grad_norm", "lr", "tokens")


def essence(lines):
    return [{k: line[k] for k in KEYS} for line in lines]


class Resume(SystemTest):
    def check(self, nproc, sets=()):
        def trained(tag, *more):
            dump = self.folder / tag
            _, log = self.train("run", "--dump-step", 8, "--dump-dir", dump, nproc=nproc, sets=["run.steps=8", *sets, *saving, *more])
            return metrics(log), safetensors(dump / "weights.safetensors")

        saving = [f"checkpoint.dir={self.folder / 'ckpt'}", "checkpoint.every=3"]
        losses, weights = trained("whole")
        # Forget everything after step 3, as a run that was stopped there; what metrics.jsonl holds of later steps is written anew.
        for folder in (self.folder / "ckpt").iterdir():
            if folder.is_dir() and int(folder.name.split("-")[-1]) > 3:
                shutil.rmtree(folder)
        resumed_losses, resumed = trained("resumed", "checkpoint.resume=latest")
        self.assertEqual(essence(resumed_losses), essence(losses))
        self.assert_equal_tensors(resumed, weights)

    def test_one_process(self):
        self.check(1)

    def test_three_processes_sgd_with_dropout(self):
        self.check(3, ["optim.name=sgd", "optim.momentum=0.9", "optim.lr=0.05", "model.dropout=0.1"])

    def checkpointed(self):
        """Settings of a run of two ranks that saved after steps 5 and 10, and a copy of what it saved."""
        sets = ["checkpoint.every=5", "run.steps=10", "optim.schedule=constant"]  # does not depend on run.steps, which resumed runs may raise
        saved = self.once("ckpt", lambda at: self.train("first", sets=[*sets, f"checkpoint.dir={at}"], nproc=2))
        shutil.copytree(saved, self.folder / "ckpt")
        sets.append(f"checkpoint.dir={self.folder / 'ckpt'}")
        folders = sorted(f for f in (self.folder / "ckpt").iterdir() if f.is_dir())
        self.assertEqual(len(folders), 2)
        return sets, folders

    def test_a_flipped_byte_falls_back_to_the_older_checkpoint(self):
        sets, folders = self.checkpointed()
        victim = next(folders[-1].glob("*.safetensors"))
        data = bytearray(victim.read_bytes())
        data[-100] ^= 1
        victim.write_bytes(data)
        done, log = self.train("second", sets=[*sets, "checkpoint.resume=latest"], nproc=2)
        self.assertIn(folders[-1].name, done.stderr)
        self.assertEqual(metrics(log)[0]["step"], 6)

    def test_a_flipped_byte_is_refused_when_named(self):
        sets, folders = self.checkpointed()
        victim = next(folders[-1].glob("*.safetensors"))
        data = bytearray(victim.read_bytes())
        data[-100] ^= 1
        victim.write_bytes(data)
        done, _ = self.train("second", sets=[*sets, f"checkpoint.resume={folders[-1]}"], nproc=2, expect=2)
        self.assertIn(victim.name, self.refusal(done))

    def test_a_missing_file_and_another_model_are_refused(self):
        sets, folders = self.checkpointed()
        done, _ = self.train("second", sets=[*sets, f"checkpoint.resume={folders[-1]}", "model.dim=64"], expect=2)
        self.assertIn("model.dim", self.refusal(done))
        done, _ = self.train("second", sets=[*sets, f"checkpoint.resume={folders[-1]}", "data.seq_len=16", "model.max_seq_len=32"], expect=2)
        self.assertIn("data.seq_len = 16: the checkpoint stands inside an epoch", self.refusal(done))
        next(folders[-1].glob("*.safetensors")).unlink()
        done, _ = self.train("second", sets=[*sets, f"checkpoint.resume={folders[-1]}"], expect=2)
        self.assertIn(".safetensors", self.refusal(done))

    def test_another_layout_resumes_within_bounds(self):
        steps = ["run.steps=14", "optim.schedule=constant"]
        losses = metrics(self.train("whole", sets=steps)[1])
        self.checkpointed()
        _, log = self.train("three", nproc=3, sets=[*steps, f"checkpoint.dir={self.folder / 'ckpt'}", "checkpoint.resume=latest"])
        self.assert_close_losses(metrics(log), losses[10:], 5e-6)

    def test_latest_without_a_checkpoint_starts_afresh_and_says_so(self):
        done, log = self.train("fresh", sets=[f"checkpoint.dir={self.folder / 'none'}", "checkpoint.resume=latest", "run.steps=4"])
        self.assertIn("no checkpoint", done.stderr.lower())
        self.assertEqual(len(metrics(log)), 4)

    def test_the_saved_configuration_keeps_what_was_asked_for(self):
        """The process that starts ranks decides for them what `latest` is; a run of what they saved asks again."""
        saved = self.folder / "ckpt"
        sets = ["optim.schedule=constant", "checkpoint.every=2", f"checkpoint.dir={saved}", "checkpoint.resume=latest"]
        _, log = self.train("run", nproc=2, sets=[*sets, "run.steps=4"])
        config = log / "config.toml"
        for steps in (6, 8):  # of a fresh start, and of one that went on
            for line in ('resume = "latest"', "replace = false"):
                self.assertIn(line, config.read_text().splitlines())
            done, _ = self.train("run", nproc=2, sets=[f"run.steps={steps}"], recipe=config)
            self.assertEqual([m["step"] for m in metrics(log)], list(range(1, steps + 1)))
            self.assertNotIn("set aside", done.stderr)
        self.assertEqual(list(saved.glob("set-aside*")), [])
        # What is found to be damaged is set aside all the same.
        for victim in saved.glob("step-*/manifest.json"):
            victim.write_text("{")
        done, _ = self.train("run", nproc=2, sets=["run.steps=4"], recipe=config)
        self.assertIn("starting afresh", done.stderr)
        self.assertTrue((saved / "set-aside-1").exists())

    def test_a_step_that_is_done_is_not_asked_for_a_dump(self):
        sets, folders = self.checkpointed()
        for nproc, step in ((1, 5), (2, 10)):
            done, log = self.train("again", "--dump-step", step, "--dump-dir", self.folder / "dump", nproc=nproc, sets=[*sets, "checkpoint.resume=latest"], expect=2)
            self.assertIn(f"--dump-step = {step}: the run goes on from step 10 ({folders[-1]})", self.refusal(done))
            self.assertFalse(log.exists(), "something was started")

    def test_inspect_lists_slices(self):
        _, folders = self.checkpointed()
        done = run("inspect", folders[-1], "--json")
        self.assertEqual(done.returncode, 0, done.stderr)
        listing = json.loads(done.stdout)
        self.assertEqual(listing["step"], 10)
        names = {entry["name"] for entry in listing["tensors"]}
        self.assertIn("norm.weight", names)
        summary, whole = (run("inspect", folders[-1], *more).stdout for more in ((), ("--tensors",)))
        self.assertRegex(summary, r"(?m)^step +10\n(.*\n)*parameters +[0-9]+\n(.*\n)*ranks +[0-9]+\nlayout +")
        self.assertRegex(summary, r"(?m)^optimizer\.exp_avg +F32 +[0-9]+ +[0-9.]+ KiB$")
        self.assertNotIn("norm.weight", summary)
        self.assertTrue(whole.startswith(summary[:summary.index("--tensors")]))
        for name in names:
            self.assertRegex(whole, rf"(?m)^{re.escape(name)} +F32 +\[")
        next(folders[-1].glob("*.safetensors")).unlink()
        done = run("inspect", folders[-1], "--json")
        self.assertIn("is missing", self.refusal(done))
        self.assertFalse(json.loads(done.stdout)["valid"], "the listing comes all the same")

    def test_nothing_left_to_do_is_said(self):
        sets, folders = self.checkpointed()
        done, _ = self.train("again", sets=[*sets, f"checkpoint.resume={folders[-1]}"])
        self.assertIn("step 10 of 10 is done already", done.stderr)
        self.assertNotRegex(done.stderr, r"steps? 11\b")


if __name__ == "__main__":
    unittest.main()
