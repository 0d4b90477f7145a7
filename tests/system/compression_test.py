"""Compressed gradients: training still learns, ranks stay equal, and a run that stops and resumes is the run that never stopped."""

import json
import pathlib
import shutil
import unittest

import numpy

from support import SystemTest, metrics, run, safetensors

KEYS = ("step", "loss", "grad_norm", "lr", "tokens")
POWERSGD = ["comm.compression=powersgd", "comm.powersgd_rank=2", "comm.powersgd_start=2"]


def stored(folder, prefix):
    """The stored tensors of a checkpoint whose names begin so: name -> list of (first row, array)."""
    manifest = json.loads((pathlib.Path(folder) / "manifest.json").read_text())
    files = {}
    tensors = {}
    for name, tensor in manifest["tensors"].items():
        if not name.startswith(prefix):
            continue
        for part in tensor["slices"]:
            if part["file"] not in files:
                files[part["file"]] = safetensors(pathlib.Path(folder) / part["file"])
            tensors.setdefault(name, []).append((part["boxes"][0][0][0], files[part["file"]][part["key"]]))
    return tensors


class Compression(SystemTest):
    def resumes(self, nproc, sets):
        """Ten steps at once, and the last four of them again from step 6."""
        saving = [f"checkpoint.dir={self.folder / 'ckpt'}", "checkpoint.every=6", "run.steps=10", *sets]
        found = []
        for tag, more in (("whole", []), ("part", ["checkpoint.resume=latest"])):
            _, log = self.train("run", "--dump-step", 10, "--dump-dir", self.folder / tag, nproc=nproc, sets=[*saving, *more])
            found.append([{k: x[k] for k in KEYS} for x in metrics(log)])
            shutil.rmtree(self.folder / "ckpt/step-00000010")
        self.assertEqual(*found)
        self.assert_equal_tensors(*(safetensors(self.folder / tag / "weights.safetensors") for tag in ("part", "whole")))

    def test_powersgd_resumes_to_the_bit(self):
        self.resumes(2, POWERSGD)

    def test_bf16_resumes_to_the_bit(self):
        self.resumes(2, ["comm.compression=bf16"])

    def saved(self, nproc, sets=POWERSGD):
        """The folder of a checkpoint after step 6."""
        self.train("first", nproc=nproc, sets=[f"checkpoint.dir={self.folder / 'ckpt'}", "run.steps=6", "optim.schedule=constant", *sets])
        return self.folder / "ckpt/step-00000006"

    def resumed(self, tag, nproc, *sets, steps=7):
        """Goes on from a copy of that checkpoint; returns the process and the folder that it saves in."""
        copy = self.folder / f"{tag}-ckpt"
        shutil.copytree(self.folder / "ckpt", copy)
        sets = [f"checkpoint.dir={copy}", "checkpoint.resume=latest", f"run.steps={steps}", "optim.schedule=constant", *sets]
        done, log = self.train(tag, nproc=nproc, sets=sets)
        return done, log, copy

    def test_another_number_of_ranks_keeps_the_sum_of_errors(self):
        folder = self.saved(3)
        errors = stored(folder, "hook.powersgd.error.")
        self.assertGreater(len(errors), 0)
        for name, rows in errors.items():
            self.assertEqual(sorted(first for first, _ in rows), [0, 1, 2], name)
        # At the checkpoint's own step the state that a resumed run holds is what it loaded: it saves it again, dealt anew.
        for world in (2, 4):
            _, _, copy = self.resumed(f"world{world}", world, *POWERSGD, "comm.powersgd_start=1000")
            dealt = stored(copy / "step-00000007", "hook.powersgd.error.")
            self.assertEqual(sorted(dealt), sorted(errors))
            for name, rows in errors.items():
                self.assertEqual(len(dealt[name]), world, name)
                want = sum(array.astype(numpy.float64) for _, array in rows)
                got = sum(array.astype(numpy.float64) for _, array in dealt[name])
                self.assertGreater(numpy.abs(want).max(), 0, name)
                self.assertLessEqual(numpy.abs(got - want).max(), 1e-6 * numpy.abs(want).max(), name)

    def test_precision_of_communication_may_change(self):
        self.saved(2)
        done, log, _ = self.resumed("off", 2)
        self.assertIn("left unread", done.stderr)
        self.assertEqual(metrics(log)[0]["step"], 7)
        done, _, _ = self.resumed("one", 1, *POWERSGD)
        self.assertIn("nothing is compressed", done.stderr)
        done, _, _ = self.resumed("rank", 2, *POWERSGD, "comm.powersgd_rank=1")
        self.assertIn("start afresh", done.stderr)
        done = run("eval", "--checkpoint", self.folder / "ckpt", "--file", self.folder / "held_out.txt", "--tokenizer", "byte", "--seq-len", 32, "--json")
        self.assertEqual(done.returncode, 0, done.stderr)

    def test_compression_can_begin_at_a_checkpoint_without_it(self):
        self.saved(2, sets=[])
        done, log, _ = self.resumed("on", 2, *POWERSGD, steps=9)
        self.assertIn("start afresh", done.stderr)
        self.assertEqual(len(metrics(log)), 3)

    def test_losses_stay_near_the_uncompressed_ones(self):
        sets = ["run.steps=50", "optim.lr=3e-3"]
        _, plain = self.train("plain", nproc=2, sets=sets)
        start, want = metrics(plain)[0]["loss"], metrics(plain)[-1]["loss"]
        self.assertLess(want, 0.75 * start)
        for tag, more, bound in (("fp16", ["comm.compression=fp16"], 0.01), ("powersgd", POWERSGD, 0.25)):
            _, log = self.train(tag, nproc=2, sets=[*sets, *more])
            got = metrics(log)[-1]["loss"]
            self.assertLess(abs(got - want), bound * (start - want), f"{tag}: {got} against {want} from {start}")

    def test_refusals(self):
        done, _ = self.train("tree", sets=["comm.compression=bf16", "run.deterministic=true"], nproc=2, expect=2)
        self.assertIn("run.deterministic = false", self.refusal(done))
        done, _ = self.train("rank", sets=["comm.compression=powersgd", "comm.powersgd_rank=0"], nproc=2, expect=2)
        self.assertIn("comm.powersgd_rank = 0", self.refusal(done))
        done, _ = self.train("name", sets=["comm.compression=zip"], nproc=2, expect=2)
        self.assertIn("comm.compression", self.refusal(done))

    def test_plan_shows_what_crosses(self):
        def reduced(*sets):
            flags = [x for s in sets for x in ("--set", s)]
            done = run("plan", self.recipe, "--world", 4, *flags, "--json")
            self.assertEqual(done.returncode, 0, done.stderr)
            return {(c["op"], c["dtype"]): c["bytes"] for c in json.loads(done.stdout)["ranks"][0]["collectives"]}

        whole = reduced()[("all_reduce", "Float")]
        self.assertEqual(2 * reduced("comm.compression=bf16")[("all_reduce", "BFloat16")], whole)
        self.assertEqual(2 * reduced("comm.compression=fp16")[("all_reduce", "Half")], whole)
        self.assertLess(3 * reduced(*POWERSGD)[("all_reduce", "Float")], whole)


if __name__ == "__main__":
    unittest.main()
