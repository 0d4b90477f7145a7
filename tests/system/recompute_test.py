"""Recomputing activations changes memory, and not one bit of the run."""

import json
import re
import unittest

from support import SystemTest, metrics, run, safetensors


class Recompute(SystemTest):
    def dumped(self, tag, nproc, sets=(), recipe=None):
        # Of a processor without bf16 products outputs would be kept in fp32.
        _, log = self.train(tag, "--dump-step", 3, "--dump-dir", self.folder / tag / "dump", nproc=nproc, sets=["run.steps=4", *sets], recipe=recipe,
                            TESSERA_CPU_FORMATS="bf16")
        return metrics(log), safetensors(log / "dump/grad.safetensors"), safetensors(log / "dump/weights.safetensors")

    def expect_same_bits(self, nproc, base, forms, recipe=None, smaller=True):
        plain, grads, weights = self.dumped("plain", nproc, base, recipe)
        for i, form in enumerate(forms):
            lines, other_grads, other_weights = self.dumped(f"again{i}", nproc, [*base, *form], recipe)
            for key in ("loss", "grad_norm"):
                self.assertEqual([m[key] for m in lines], [m[key] for m in plain], f"{form}: {key}")
            for got, want in ((other_grads, grads), (other_weights, weights)):
                self.assert_equal_tensors(got, want, form)
            if smaller:
                self.assertLess(lines[-1]["peak_bytes"], plain[-1]["peak_bytes"], f"{form}")

    def planned(self, *sets, world=1):
        """What `tessera plan` says of rank 0."""
        done = run("plan", self.recipe, "--world", world, "--json", *[x for s in sets for x in ("--set", s)])
        self.assertEqual(done.returncode, 0, done.stderr)
        return json.loads(done.stdout)["ranks"][0]

    def test_full_is_bit_identical_and_smaller(self):
        self.expect_same_bits(2, ["batch.micro_size=6"], [["recompute.mode=full"], ["recompute.mode=full", "recompute.every=2"]])

    def test_selective_and_budget_are_bit_identical(self):
        recipe = self.write_recipe("gpt2.toml", family="gpt2", kv_heads=4)
        forms = [["recompute.mode=selective", 'recompute.keep=["mm", "addmm"]'], ["recompute.mode=full", "recompute.budget_bytes=600000"]]
        self.expect_same_bits(1, ["model.dropout=0.1", "batch.micro_size=6", "precision.compute=bf16"], forms, recipe)

    def test_layouts_keep_their_bits(self):
        # 6 micro-batches, so each of 2 ranks accumulates 3; weights of stage 3 are gathered again, ahead of time, for the second pass. The others: tests/train.
        for nproc, layout in ((2, ["zero.stage=2"]), (4, ["zero.stage=3", "mesh.dp_replicate=2"])):
            with self.subTest(layout=layout):
                self.expect_same_bits(nproc, layout, [["recompute.mode=full"]], smaller=False)

    def test_plan_shows_the_same_peak(self):
        for i, form in enumerate((["recompute.mode=full"], ["recompute.mode=selective"], ["recompute.mode=full", "recompute.budget_bytes=400000"])):
            sets = ["batch.micro_size=6", "run.steps=4", *form]
            _, log = self.train(f"run{i}", sets=sets)
            self.assertEqual(self.planned(*sets)["peak_bytes"]["total"], max(m["peak_bytes"] for m in metrics(log)), f"{form}")

    def test_recomputation_raises_hfu_alone(self):
        share = {}  # of hfu in mfu: the time of a step is in both
        for mode in ("none", "full"):
            sets = ["run.steps=3", "log.peak_tflops=0.25", f"recompute.mode={mode}"]
            _, log = self.train(mode, nproc=2, sets=sets)
            planned = self.planned(*sets, world=2)
            for line in metrics(log):
                self.assertAlmostEqual(line["mfu"], line["tflops_per_device"] / 0.25)
                self.assertAlmostEqual(line["hfu"], line["hardware_tflops_per_device"] / 0.25)
                self.assertAlmostEqual(line["tflops_per_device"] * 2 * line["step_s"] * 1e12 / (2 * planned["flops"]), 1)
                self.assertEqual(line["recomputed_flops"], 2 * planned["recomputed_flops"])
                share[mode] = line["hfu"] / line["mfu"]
                self.assertAlmostEqual(share[mode], planned["hardware_flops"] / planned["flops"])
            self.assertEqual(planned["recomputed_flops"] > 0, mode == "full")
        self.assertGreater(share["full"], 1.15 * share["none"])
        self.assertLess(share["full"], 4 / 3 * share["none"])
        _, log = self.train("unknown", sets=["run.steps=3"])
        self.assertNotIn("mfu", metrics(log)[0])

    def test_the_smallest_budget_is_named_and_works(self):
        def tried(budget):
            sets = (f"log.dir={self.folder / 'log'}", "run.steps=3", "recompute.mode=full", f"recompute.budget_bytes={budget}")
            return run("train", self.recipe, *[x for s in sets for x in ("--set", s)])

        smallest = int(re.search(r"alone, which recomputation needs, are (\d+) bytes", self.refusal(tried(1)))[1])
        self.assertIn(f"recompute.budget_bytes = {smallest - 1}", self.refusal(tried(smallest - 1)))
        done = tried(smallest)
        self.assertEqual(done.returncode, 0, done.stderr)

    def test_refusals(self):
        def refused(*sets):
            return self.refusal(run("train", self.recipe, *[x for s in (f"log.dir={self.folder / 'log'}", *sets) for x in ("--set", s)]))

        self.assertIn("nearest path is 'layers'", refused("recompute.mode=full", "recompute.modules=layer.*"))
        self.assertIn("did you mean 'aten::gelu'", refused("recompute.mode=selective", "recompute.keep=geluu"))
        self.assertIn("recompute.budget_bytes = 1000", refused("recompute.mode=full", "recompute.budget_bytes=1000"))
        self.assertIn("recompute.every = 1", refused("recompute.mode=full", "recompute.every=2", "recompute.budget_bytes=1000"))


if __name__ == "__main__":
    unittest.main()
