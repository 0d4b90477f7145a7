"""`tessera verify`: a layout against one device, by exit code, table and JSON."""

import json
import unittest

from support import SOURCE, SystemTest, run


class Verify(SystemTest):
    def verify(self, *arguments, sets=(), expect=0, recipe=None):
        flags = [x for s in sets for x in ("--set", s)]
        done = run("verify", recipe or self.recipe, *arguments, *flags)
        self.assertEqual(done.returncode, expect, f"{done.stdout}\n{done.stderr}")
        return done

    def test_data_parallel_is_within_the_bounds(self):
        report = json.loads(self.verify("--mesh", "dp_replicate=3", "--json", sets=["model.dropout=0.1"]).stdout)
        self.assertTrue(report["passed"])
        self.assertEqual(report["ranks"], 3)
        self.assertEqual(report["mesh"]["dp_replicate"], 3)
        self.assertEqual(report["initial_weights"]["difference"], 0)
        self.assertEqual((report["loss"]["bound"], report["gradients"]["bound"]), (5e-6, 1e-5))
        self.assertIsNone(report["forward"]["first_parting"])
        self.assertIn("layers.2.attention.wo.weight", [row["name"] for row in report["tensors"]])

    def test_deterministic_is_bit_for_bit(self):
        done = self.verify("--mesh", "dp_replicate=5", sets=["run.deterministic=true"])
        self.assertEqual(done.stdout.splitlines()[-1], "verified: bit for bit")
        self.assertIn("dp_replicate 5 against one device", done.stdout)

    def test_smoothed_labels_and_z_loss_with_the_vocabulary_cut(self):
        sets = ["loss.label_smoothing=0.1", "loss.z_loss=1e-3"]
        for mesh, more in (("tp=2", []), ("tp=2,dp_shard=2", ["zero.stage=3", "tensor.sequence_parallel=true", "model.tie_embeddings=true"])):
            with self.subTest(mesh=mesh):
                self.verify("--mesh", mesh, sets=[*sets, *more])

    def test_sharding_is_within_the_bounds(self):
        for stage, mesh in ((2, "dp_replicate=2,dp_shard=2"), (3, "dp_shard=3")):
            with self.subTest(stage=stage, mesh=mesh):
                self.verify("--mesh", mesh, sets=[f"zero.stage={stage}"])

    def test_every_small_recipe(self):
        for recipe in sorted((SOURCE / "recipes").glob("tiny_*.toml")):
            with self.subTest(recipe=recipe.name):
                sets = [f'data.files=["{self.folder / "text.txt"}"]', f"data.cache_dir={self.folder / 'cache'}", "data.tokenizer=byte"]
                self.verify("--mesh", "dp_replicate=2", sets=sets, recipe=recipe)

    def test_from_a_checkpoint(self):
        self.train("run", sets=[f"checkpoint.dir={self.folder / 'saved'}", "run.steps=3"])
        done = self.verify("--mesh", "dp_replicate=2", "--json", sets=[f"checkpoint.resume={self.folder / 'saved' / 'step-00000003'}"])
        self.assertEqual(json.loads(done.stdout)["first_step"], 4)

    def test_from_the_newest_checkpoint_that_is_whole(self):
        folder = self.folder / "newest"
        latest = [f"checkpoint.dir={folder}", "checkpoint.resume=latest"]
        self.train("newest_run", sets=[f"checkpoint.dir={folder}", "run.steps=3", "checkpoint.every=2"])
        for file in (folder / "step-00000003").glob("*.safetensors"):
            file.write_bytes(file.read_bytes()[:-8] + b"otherwise"[:8])
        done = self.verify("--mesh", "dp_replicate=2", "--json", sets=latest)
        self.assertEqual(json.loads(done.stdout)["first_step"], 3)
        self.assertIn("passing over ", done.stderr)
        self.assertIn("step-00000003", done.stderr)
        for file in (folder / "step-00000002").glob("*.safetensors"):
            file.write_bytes(b"")
        refused = run("verify", self.recipe, "--mesh", "dp_replicate=2", *(x for s in latest for x in ("--set", s)))
        self.assertEqual(refused.returncode, 2, refused.stdout)
        self.assertIn("holds no checkpoint that can be used", refused.stderr)
        self.assertIn("step-00000002", refused.stderr)
        self.assertNotIn("starting afresh", refused.stderr)

    def test_a_setting_that_changes_the_gradients_is_found(self):
        # Every number of a gradient rounded to 8 bits is beyond what fp32 allows, and within what bf16 does.
        report = json.loads(self.verify("--mesh", "dp_replicate=2", "--json", sets=["comm.compression=bf16"]).stdout)
        self.assertGreater(report["gradients"]["difference"], 1e-5)
        self.assertLess(report["gradients"]["difference"], report["gradients"]["bound"])

    def test_bad_input(self):
        cases = [
            (["--mesh", "dp_replicat=2"], "did you mean dp_replicate?"),
            (["--mesh", "dp_replicate=7"], "batch.global_size = 12"),
            (["--mesh", "cp=5", "--set", "context.method=ulysses"], "mesh.cp = 5"),
            (["--mesh", "pp=9"], "a chain of "),
            (["--mesh", "dp_replicate=2", "--steps", "21"], "--steps = 21"),
            (["--mesh", "dp_replicate=2", "--set", "model.dimm=3"], "dim"),
        ]
        for arguments, text in cases:
            with self.subTest(arguments=arguments):
                self.assertIn(text, self.refusal(run("verify", self.recipe, *arguments)))
        self.assertEqual(run("verify", self.recipe).returncode, 2)


if __name__ == "__main__":
    unittest.main()
