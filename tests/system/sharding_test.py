"""Sharded data parallelism trains the run of one device, and its checkpoints load in every other layout."""

import json
import shutil
import unittest

from support import SystemTest, metrics, run, safetensors

GRADIENTS = 1e-5  # of a tensor's largest entry
LOSSES = 5e-6  # relative

# Name -> number of processes, settings.
LAYOUTS = {
    "one": (1, []),
    "zero1x2": (2, ["zero.stage=1"]),
    "zero3x3": (3, ["zero.stage=3"]),
    "hybrid2x2": (4, ["zero.stage=2", "mesh.dp_replicate=2"]),
}


class Sharding(SystemTest):
    def run_layout(self, tag, layout, *arguments, sets=(), **more):
        nproc, own = LAYOUTS[layout]
        return self.train(tag, *arguments, nproc=nproc, sets=["zero.bucket_bytes=20000", *own, *sets], **more)[1]

    def dumped(self, layout, sets=()):
        dump = self.folder / layout / "dump"
        log = self.run_layout(layout, layout, "--dump-step", 2, "--dump-dir", dump, sets=["run.steps=8", *sets])
        return metrics(log), safetensors(dump / "grad.safetensors"), safetensors(dump / "weights.safetensors")

    def test_every_layout_trains_the_same_run(self):
        losses, grads, weights = self.dumped("one")
        self.assertLess(losses[-1]["loss"], losses[0]["loss"])
        for layout in list(LAYOUTS)[1:]:
            other_losses, other_grads, other_weights = self.dumped(layout)
            self.assert_close_tensors(other_grads, grads, GRADIENTS)
            self.assert_close_losses(other_losses, losses, LOSSES)
            self.assertEqual(sorted(other_weights), sorted(weights))
            for mine, theirs in zip(other_losses, losses):
                self.assertAlmostEqual(mine["grad_norm"], theirs["grad_norm"], delta=2e-5 * theirs["grad_norm"])

    def test_a_checkpoint_goes_on_in_other_layouts(self):
        """tests/train/resume_test.cpp takes every pair, its state and bits included."""
        constant = "optim.schedule=constant"  # does not depend on run.steps, which the resumed runs raise
        losses = metrics(self.run_layout("whole", "one", sets=[constant, "run.steps=8"]))
        for source, target in (("zero3x3", "hybrid2x2"), ("hybrid2x2", "one")):
            saved = self.folder / f"saved-{source}"
            self.run_layout(f"first-{source}", source, sets=[constant, "run.steps=4", f"checkpoint.dir={saved}"])
            (folder,) = [f for f in saved.iterdir() if f.is_dir()]
            log = self.run_layout(f"{source}-to-{target}", target, sets=[constant, "run.steps=8", f"checkpoint.resume={folder}"])
            self.assert_close_losses(metrics(log), losses[4:], LOSSES)

    def test_eval_and_generate_take_its_checkpoints(self):
        saved = self.folder / "saved"
        log = self.run_layout("trained", "zero1x2", sets=["run.steps=6", f"checkpoint.dir={saved}"])
        self.assertEqual(len(metrics(log)), 6)
        held_out = self.folder / "held_out.txt"
        results = []
        for nproc in (1, 2):
            done = run("eval", "--checkpoint", saved, "--file", held_out, "--tokenizer", "byte", "--seq-len", 32, "--nproc", nproc, "--json")
            self.assertEqual(done.returncode, 0, done.stderr)
            results.append(json.loads(done.stdout)["loss"])
        self.assertAlmostEqual(results[0], results[1], delta=1e-6 * results[0])
        done = run("generate", "--checkpoint", saved, "--prompt", "the ", "--max-tokens", 4)
        self.assertEqual(done.returncode, 0, done.stderr)

    def test_an_interrupted_run_equals_an_uninterrupted_one(self):
        saved = self.folder / "saved"
        saving = [f"checkpoint.dir={saved}", "checkpoint.every=4", "run.steps=8"]
        whole = metrics(self.run_layout("whole", "zero3x3", sets=saving))
        weights_and_optimizer = self.files(saved / "step-00000008")
        shutil.rmtree(saved / "step-00000008")
        log = self.run_layout("part", "zero3x3", sets=[*saving, "checkpoint.resume=latest"])
        self.assertEqual([m["loss"] for m in metrics(log)], [m["loss"] for m in whole[4:]])
        self.assertEqual([m["grad_norm"] for m in metrics(log)], [m["grad_norm"] for m in whole[4:]])
        self.assertEqual(self.files(saved / "step-00000008"), weights_and_optimizer)

    def files(self, checkpoint):
        return {path.name: path.read_bytes() for path in checkpoint.glob("*.safetensors")}

    def test_plan_shows_what_is_sharded(self):
        plans = {}
        for stage in (0, 1, 2):
            done = run("plan", self.recipe, "--world", 2, "--set", f"zero.stage={stage}", "--json")
            self.assertEqual(done.returncode, 0, done.stderr)
            plans[stage] = json.loads(done.stdout)["ranks"][0]
        optimizer = {stage: plan["peak_bytes"]["optimizer"] for stage, plan in plans.items()}
        self.assertAlmostEqual(optimizer[1] / optimizer[0], 0.5, delta=0.02)
        self.assertAlmostEqual(optimizer[2] / optimizer[0], 0.5, delta=0.02)
        ops = {c["op"] for c in plans[2]["collectives"] if c["axis"] == "dp_shard"}
        self.assertLessEqual({"reduce_scatter", "all_gather"}, ops)

    def test_stage_3_validates_as_it_trains(self):
        validations = []
        for layout in ("one", "zero3x3"):
            log = self.run_layout(f"validated-{layout}", layout, sets=["run.steps=4", "run.validate_every=2"])
            validations.append([json.loads(line)["loss"] for line in (log / "validation.jsonl").read_text().splitlines()])
        self.assertEqual(len(validations[0]), 2)
        for mine, theirs in zip(*validations):
            self.assertAlmostEqual(mine, theirs, delta=LOSSES * theirs)

    def test_units_of_stage_3_are_refused_before_any_rank_starts(self):
        for setting, words in (
            ("zero.wrap=layer.*", ["zero.wrap = 'layer.*'", "no module matches", "the nearest path is 'layers'"]),
            ("run.memory_limit_bytes=10000", ["unit 'layers.0' (with 'layers.0.feed_forward.w1.weight') alone takes 83328 bytes", "zero.wrap"]),
        ):
            done, log = self.train("refused", nproc=2, sets=["zero.stage=3", setting], expect=2)
            for word in words:
                self.assertIn(word, self.refusal(done))
            self.assertFalse(log.exists(), "a rank has begun to write")

    def test_what_does_not_go_together_is_refused(self):
        for stage, setting, way_out in ((1, "run.deterministic=true", "zero.stage = 0"), (2, "comm.compression=powersgd", "set comm.compression to none, bf16 or fp16, or zero.stage = 0")):
            done, _ = self.train("refused", nproc=2, sets=[f"zero.stage={stage}", setting], expect=2)
            self.assertIn(way_out, self.refusal(done))


if __name__ == "__main__":
    unittest.main()
