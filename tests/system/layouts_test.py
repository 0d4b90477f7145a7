"""Any number of ranks trains the same run as one device. tests/train and tests/verify take every layout with threads as ranks; here one of each kind by processes."""

import unittest

from support import SOURCE, SystemTest, metrics, safetensors

GRADIENTS = 1e-5  # of a tensor's largest entry
LOSSES = 5e-6  # relative
STEPS = 8


class Layouts(SystemTest):
    def dumped(self, tag, nproc, sets=(), recipe=None):
        _, log = self.train(tag, "--dump-step", 2, "--dump-dir", self.folder / tag / "dump", nproc=nproc, sets=[f"run.steps={STEPS}", *sets], recipe=recipe)
        return metrics(log), safetensors(log / "dump/grad.safetensors"), safetensors(log / "dump/weights.safetensors")

    def compare(self, worlds, sets=(), recipe=None):
        losses, grads, weights = self.dumped("one", 1, sets, recipe)
        self.assertEqual([m["step"] for m in losses], list(range(1, STEPS + 1)))
        self.assertLess(losses[-1]["loss"], losses[0]["loss"])
        for world in worlds:
            other_losses, other_grads, other_weights = self.dumped(f"world{world}", world, sets, recipe)
            self.assert_close_tensors(other_grads, grads, GRADIENTS)
            self.assert_close_losses(other_losses, losses, LOSSES)
            for mine, theirs in zip(other_losses, losses):
                self.assertEqual(mine["tokens"], theirs["tokens"])
                self.assertAlmostEqual(mine["grad_norm"], theirs["grad_norm"], delta=2e-5 * theirs["grad_norm"])

    def test_llama_adamw(self):
        self.compare([2, 4])

    def test_gpt2_tied_with_dropout(self):
        self.compare([3], sets=["model.dropout=0.1", "model.tie_embeddings=true"], recipe=self.write_recipe("gpt2.toml", family="gpt2", kv_heads=4))

    def test_mlp(self):
        self.compare([2], recipe=self.write_recipe("mlp.toml", family="mlp", kv_heads=4))

    def test_sgd_on_unequal_runs_and_more_accumulation(self):
        # 7 micro-batches over 5 ranks: two ranks run 2, three run one and one of weight 0.
        self.compare([5], sets=["optim.name=sgd", "optim.lr=0.05", "optim.momentum=0.9", "batch.global_size=7", "batch.micro_size=1"])

    def test_the_recipe_that_cuts_layers_and_shards_them(self):
        recipe = SOURCE / "recipes/llama_tp2_fsdp2.toml"
        sets = [f'data.files=["{self.folder / "text.txt"}"]', f"data.cache_dir={self.folder / 'cache'}", "run.steps=20"]
        alone = ["mesh.tp=1", "mesh.dp_shard=1", "zero.stage=0", "tensor.sequence_parallel=false"]
        four = metrics(self.train("four", nproc=4, sets=sets, recipe=recipe)[1])
        one = metrics(self.train("one", sets=[*sets, *alone], recipe=recipe)[1])
        self.assertLess(one[-1]["loss"], 0.8 * one[0]["loss"])
        self.assert_close_losses(four, one, LOSSES)

    def test_the_recipe_that_cuts_sequences(self):
        recipe = SOURCE / "recipes/llama_long_cp2.toml"
        sets = [f'data.files=["{self.folder / "text.txt"}"]', f"data.cache_dir={self.folder / 'cache'}", "run.steps=12", "data.seq_len=333"]
        two = metrics(self.train("two", nproc=2, sets=sets, recipe=recipe)[1])
        one = metrics(self.train("one", sets=[*sets, "mesh.cp=1", "recompute.mode=none"], recipe=recipe)[1])
        self.assertLess(one[-1]["loss"], 0.9 * one[0]["loss"])
        self.assert_close_losses(two, one, LOSSES)

    def test_the_recipe_that_packs_documents(self):
        recipe = SOURCE / "recipes/llama_lines_cp2.toml"
        sets = [f"data.cache_dir={self.folder / 'cache'}", "run.steps=8"]
        two = metrics(self.train("two", nproc=2, sets=sets, recipe=recipe)[1])
        one = metrics(self.train("one", sets=[*sets, "mesh.cp=1", "recompute.ffn_tile=0"], recipe=recipe)[1])
        self.assertLess(one[-1]["loss"], 0.9 * one[0]["loss"])
        self.assertEqual([m["tokens"] for m in two], [m["tokens"] for m in one])
        self.assert_close_losses(two, one, LOSSES)

    def test_deterministic_runs_are_bit_identical(self):
        sets = ["run.deterministic=true", "batch.global_size=14"]
        losses, grads, weights = self.dumped("one", 1, sets)
        other_losses, other_grads, other_weights = self.dumped("three", 3, sets)
        self.assertEqual([m["loss"] for m in other_losses], [m["loss"] for m in losses])
        self.assertEqual([m["grad_norm"] for m in other_losses], [m["grad_norm"] for m in losses])
        self.assert_equal_tensors(other_grads, grads, "gradient of")
        self.assert_equal_tensors(other_weights, weights)

    def test_a_planted_bug_is_found(self):
        losses, grads, _ = self.dumped("one", 1)
        halved = {name: (g * 0.5 if name.endswith("model.norm.weight") else g) for name, g in grads.items()}
        with self.assertRaises(AssertionError):
            self.assert_close_tensors(halved, grads, GRADIENTS)
        # Fewer micro-batches in the same step: what a rank whose contribution is dropped looks like.
        _, dropped, _ = self.dumped("dropped", 1, sets=["batch.global_size=10", "data.shuffle=false"])
        _, whole, _ = self.dumped("whole", 1, sets=["data.shuffle=false"])
        with self.assertRaises(AssertionError):
            self.assert_close_tensors(dropped, whole, GRADIENTS)


if __name__ == "__main__":
    unittest.main()
