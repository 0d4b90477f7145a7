"""Training in 16 bits ends where fp32 does; steps that overflow are skipped and counted; what is not finite is named."""

import json
import struct
import unittest

from support import SystemTest, metrics, run

FP16 = ["precision.params=fp16", "precision.compute=fp16", "precision.loss_scale=dynamic"]
BF16 = ["precision.params=bf16", "precision.compute=bf16"]
FIRST_SCALE = 65536
LARGEST_SCALE = 2**24


def plant(folder, tensor, value):
    """Writes `value` into the first element of an F32 tensor of a checkpoint."""
    for path in folder.rglob("*.safetensors"):
        data = bytearray(path.read_bytes())
        (size,) = struct.unpack("<Q", data[:8])
        entry = json.loads(data[8 : 8 + size]).get(tensor)
        if entry:
            struct.pack_into("<f", data, 8 + size + entry["data_offsets"][0], value)
            path.write_bytes(data)
            return
    raise KeyError(tensor)


class Precision(SystemTest):
    def log(self, tag, sets, nproc=1):
        return metrics(self.train(tag, sets=sets, nproc=nproc)[1])

    def test_sixteen_bits_end_within_a_percent_of_fp32(self):
        steps = ["run.steps=50", "optim.lr=3e-3"]
        fp32 = self.log("fp32", steps)
        self.assertLess(fp32[-1]["loss"], 0.7 * fp32[0]["loss"])
        bf16 = self.log("bf16", [*steps, *BF16, "precision.reduce=bf16", "zero.stage=3"], nproc=2)  # others in tests/train/precision_test.cpp
        self.assertLessEqual(abs(bf16[-1]["loss"] - fp32[-1]["loss"]), 0.01 * fp32[-1]["loss"])

    def test_a_dynamic_scale_follows_its_rule_and_the_schedule_waits(self):
        growth = 3
        for nproc, sets in ((1, []), (2, ["zero.stage=1"])):
            lines = self.log(f"dynamic{nproc}", [*FP16, *sets, f"precision.growth_steps={growth}", "run.steps=40"], nproc)
            scale, finite, skipped, rates = FIRST_SCALE, 0, 0, []
            for line in lines:
                if line["grad_norm"] is None:
                    scale, finite, skipped = scale / 2, 0, skipped + 1
                else:
                    rates.append(line["lr"])
                    finite += 1
                    if finite == growth:
                        scale, finite = min(2 * scale, LARGEST_SCALE), 0
                self.assertEqual((line["loss_scale"], line["skipped_steps"]), (scale, skipped), line)
            self.assertGreater(skipped, 0, "a scale that doubles every third step overflows sooner or later")
            applied = metrics(self.once("fp32", lambda at: self.train("fp32", sets=["run.steps=40", f"log.dir={at}"])))
            self.assertEqual(rates, [line["lr"] for line in applied[: len(rates)]])

    def test_an_interrupted_run_goes_on_with_its_scale_to_the_bit(self):
        sets = [*FP16, "precision.growth_steps=2", "run.steps=24", "optim.schedule=constant"]
        for nproc, stage in ((1, 0), (2, 3)):
            layout = [*sets, f"zero.stage={stage}"]
            saved = self.folder / f"saved-{nproc}-{stage}"
            whole = self.log(f"whole-{nproc}-{stage}", [*layout, f"checkpoint.dir={saved}", "checkpoint.every=18"], nproc)
            resumed = self.log(f"resumed-{nproc}-{stage}", [*layout, f"checkpoint.resume={saved / 'step-00000018'}"], nproc)
            self.assertEqual(len(resumed), 6)
            for mine, theirs in zip(resumed, whole[18:]):
                for key in ("step", "loss", "grad_norm", "lr", "loss_scale", "skipped_steps"):
                    self.assertEqual(mine[key], theirs[key], f"{key} of step {mine['step']}")

    def test_a_run_stops_after_so_many_skips_in_a_row(self):
        sets = ["precision.params=fp16", "precision.compute=fp16", "precision.loss_scale=1e30", "precision.max_skips=3"]
        done, log = self.train("stops", sets=sets, nproc=2, expect=1)
        self.assertIn("step 3: the gradient's norm is not finite for 3 steps in a row (precision.max_skips), at a loss scale of 1e+30", done.stderr)
        self.assertRegex(done.stderr, r"on rank 0 the (output|gradient) of '[a-z0-9_.]+' is the first that is not finite")
        lines = metrics(log)
        self.assertEqual([line["skipped_steps"] for line in lines], [1, 2])
        self.assertEqual([line["grad_norm"] for line in lines], [None, None])
        self.assertEqual([line["lr"] for line in lines], [lines[0]["lr"]] * 2)
        self.assertEqual(len(set(line["loss"] for line in lines if line["loss"] is not None)), 2, "other batches, the same weights")

    def test_a_planted_nan_is_named_with_step_rank_and_module(self):
        saved = self.folder / "saved"
        self.train("first", sets=["run.steps=10", f"checkpoint.dir={saved}"])
        (folder,) = saved.iterdir()
        plant(folder, "model.layers.1.attention.wv.weight", float("nan"))
        for nproc, stage in ((1, 0), (2, 3)):
            sets = [f"checkpoint.resume={folder}", "checkpoint.verify=false", f"zero.stage={stage}", "run.steps=12"]
            done, _ = self.train(f"nan-{nproc}-{stage}", sets=sets, nproc=nproc, expect=1)
            self.assertIn("step 11: the gradient's norm is not finite: on rank 0 the output of 'layers.1.attention.wv' is the first", done.stderr)
            self.assertIn("the step was not applied", done.stderr)

    def test_what_makes_no_sense_is_refused(self):
        for sets, words in (
            (["precision.compute=bf16", "precision.loss_scale=dynamic"], "precision.loss_scale = dynamic: gradients are scaled against the underflow of fp16"),
            (["precision.params=fp16", "precision.compute=bf16"], "precision.compute = bf16: precision.params = fp16"),
            (["precision.params=fp16", "precision.compute=fp16", "precision.master=fp16"], "rounded stochastically in bf16 only"),
            (["precision.compute=fp4"], "precision.compute"),
            (["precision.params=fp16", "precision.compute=auto", "precision.loss_scale=dynamic"], "precision.compute = auto: becomes bf16 or fp32 by the machine"),
            (["precision.reduce=fp8"], "precision.reduce = fp8: fp8 is a format of matrix products"),
        ):
            done, _ = self.train("refused", sets=sets, expect=2)
            self.assertIn(words, self.refusal(done))


class Formats(SystemTest):
    """Number formats that follow the machine, which TESSERA_CPU_FORMATS stands for here: fp32 is a CPU without bf16 products."""

    KINDS = {"fp32": "fp32", "bf16": "bf16"}

    def run_on(self, kind, tag, sets, **more):
        done, log = self.train(tag, sets=["run.steps=6", *sets], TESSERA_CPU_FORMATS=kind, **more)
        return done.stderr, log

    def losses(self, log):
        return [(line["loss"], line["grad_norm"]) for line in metrics(log)]

    def test_auto_is_settled_once_said_and_recorded(self):
        for kind, became in self.KINDS.items():
            text, log = self.run_on(kind, f"auto-{kind}", ["precision.compute=auto"], nproc=2)
            self.assertEqual(text.count("precision.compute = auto: "), 1, text)
            self.assertIn(f"precision.compute = auto: {became}, ", text)
            self.assertIn(f"(TESSERA_CPU_FORMATS = {kind})", text)
            self.assertIn(f'compute = "auto"  # became "{became}"', (log / "config.toml").read_text())
            named = self.run_on(kind, f"named-{kind}", [f"precision.compute={became}"], nproc=2)[1]
            self.assertEqual(self.losses(log), self.losses(named))
        again = self.run_on(kind, "again", [], recipe=log / "config.toml", nproc=2)[1]
        self.assertEqual(self.losses(again), self.losses(log))

    def test_bf16_by_name_on_a_cpu_without_it_is_widened(self):
        text, log = self.run_on("fp32", "widened", ["precision.compute=bf16"])
        self.assertEqual(text.count("precision.compute = bf16: this CPU does not multiply bf16"), 1, text)
        emulated = self.losses(self.run_on("bf16", "emulated", ["precision.compute=bf16"])[1])
        fp32 = self.losses(self.run_on("fp32", "fp32", ["precision.compute=fp32"])[1])
        for mine, theirs, wide in zip(self.losses(log), emulated, fp32):
            self.assertAlmostEqual(mine[0], theirs[0], delta=2e-3 * theirs[0])
            self.assertNotEqual(mine, wide, "operands are rounded to bf16")

    def test_a_checkpoint_goes_on_with_and_is_read_by_the_other_kind(self):
        for kind, other in (("bf16", "fp32"), ("fp32", "bf16")):
            saved = self.folder / f"saved-{kind}"
            sets = ["precision.compute=auto", f"checkpoint.dir={saved}"]
            self.run_on(kind, f"first-{kind}", [*sets, "run.steps=4"])
            text, log = self.run_on(other, f"second-{kind}", [*sets, "checkpoint.resume=latest"])
            self.assertIn("within bounds (the arithmetic is another)", text)
            self.assertIn(f"precision.compute = auto: {other}, ", text)
            whole = self.run_on(kind, f"whole-{kind}", ["precision.compute=auto"])[1]
            for (mine, _), (theirs, _) in zip(self.losses(log), self.losses(whole)[4:]):
                self.assertAlmostEqual(mine, theirs, delta=5e-3 * theirs)
            read = [run("eval", "--checkpoint", saved, "--file", self.folder / "held_out.txt", "--seq-len", 32, "--json", TESSERA_CPU_FORMATS=k) for k in self.KINDS]
            losses = [json.loads(done.stdout)["loss"] for done in read]
            self.assertAlmostEqual(*losses, delta=5e-3 * losses[0])
            self.assertIn("precision.compute = auto: fp32", read[0].stderr)

    def test_widened_products_are_another_arithmetic_to_a_replay(self):
        sets = ["precision.compute=bf16", f"checkpoint.dir={self.folder / 'saved'}", "checkpoint.resume=latest"]
        self.run_on("bf16", "first", [*sets, "run.steps=3"])
        for kind, steps, words in (("fp32", 4, "replays within bounds"), ("fp32", 5, "replays bit for bit"), ("bf16", 6, "replays within bounds")):
            self.assertIn(words, self.run_on(kind, f"step-{steps}", [*sets, f"run.steps={steps}"])[0], steps)

    def test_a_plan_follows_the_machine_and_a_preset_does_not(self):
        def compute(kind, *arguments):
            done = run("plan", *arguments, "--json", TESSERA_CPU_FORMATS=kind)
            plan = json.loads(done.stdout)
            return plan["compute"], plan["ranks"][0]["peak_bytes"]["total"]

        for kind, became in self.KINDS.items():
            asked = compute(kind, self.recipe, "--set", "precision.compute=auto")
            self.assertEqual(asked, compute(kind, self.recipe, "--set", f"precision.compute={became}"))
            self.assertEqual(asked[0], became)
        named = [compute(kind, self.recipe, "--set", "precision.compute=bf16")[1] for kind in self.KINDS]
        self.assertNotEqual(*named, "widened operands take memory while a product runs")
        self.assertEqual(*(compute(kind, "7b", "--world", 1024, "--set", "zero.stage=3") for kind in self.KINDS))

    def test_a_wrong_switch_is_refused(self):
        done = run("plan", self.recipe, "--set", "precision.compute=auto", TESSERA_CPU_FORMATS="fp64")
        self.assertIn("TESSERA_CPU_FORMATS = fp64: expected fp32", self.refusal(done))

    def test_a_wrong_switch_of_products_is_refused_alone(self):
        saved = self.folder / "saved"
        self.train("sound", sets=["run.steps=6", f"checkpoint.dir={saved}"])
        for command in (
            ("train", self.recipe),
            ("train", self.recipe, "--nproc", 2),
            ("eval", "--checkpoint", saved, "--file", self.folder / "held_out.txt", "--seq-len", 32),
            ("generate", "--checkpoint", saved, "--prompt", "a"),
            ("verify", self.recipe, "--mesh", "dp_replicate=2"),
            ("bench", "device"),
        ):
            done = run(*command, TESSERA_CPU_PRODUCTS="bar")
            self.assertEqual((done.returncode, done.stdout), (2, ""), command)
            self.assertTrue(self.refusal(done).startswith("tessera: TESSERA_CPU_PRODUCTS = bar: expected onednn"), done.stderr)
            self.assertEqual(done.stderr.count("\n"), 1, done.stderr)
        self.assertEqual(run("plan", self.recipe, TESSERA_CPU_PRODUCTS="bar").returncode, 0, "which computes nothing")


if __name__ == "__main__":
    unittest.main()
