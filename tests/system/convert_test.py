"""A checkpoint of several ranks becomes a Hugging Face model that transformers loads, and that evaluates to the same loss."""

import json
import unittest

import numpy

from support import SystemTest, run, safetensors

try:
    import torch
    import transformers
except ImportError:
    transformers = None


class Convert(SystemTest):
    def trained(self, family="llama", *sets):
        def train(saved):
            recipe = self.write_recipe(f"{family}.toml", family=family, kv_heads=4 if family == "gpt2" else 2)
            experts = ["model.experts=3", "model.experts_per_token=2"] if family == "mixtral" else []
            self.train(f"{family}-run", nproc=2, recipe=recipe, sets=[f"checkpoint.dir={saved}", "run.steps=3", *experts, *sets])

        return self.once("-".join((family, *sets)), train)

    def convert(self, checkpoint, out, *flags, to="hf", expect=0):
        done = run("convert", checkpoint, out, "--to", to, *flags)
        self.assertEqual(done.returncode, expect, done.stderr)
        return done

    def evaluated(self, *source):
        done = run("eval", *source, "--file", self.folder / "held_out.txt", "--tokenizer", "byte", "--seq-len", 32, "--micro-size", 4, "--json")
        self.assertEqual(done.returncode, 0, done.stderr)
        return json.loads(done.stdout)

    def test_a_folder_without_a_tokenizer_says_that_it_is_read_as_bytes(self):
        checkpoint, out = self.trained("llama", "model.vocab_size=300"), self.folder / "wide"
        self.convert(checkpoint, out)
        read = ("eval", "--from-hf", out, "--file", self.folder / "held_out.txt", "--seq-len", 32, "--json")
        unnamed, named = run(*read), run(*read, "--tokenizer", "byte")
        said = "brings no tokenizer.model, and the text is read as bytes"
        self.assertEqual((unnamed.returncode, said in unnamed.stderr, said in named.stderr), (0, True, False), unnamed.stderr)
        self.assertEqual(unnamed.stdout, named.stdout)
        (out / "tokenizer.model").write_text("none")
        self.assertIn("tokenizer.model", self.refusal(run(*read)))

    def test_every_family_evaluates_to_the_same_loss(self):
        for family, layout in (("llama", "zero.stage=3"), ("gpt2", "zero.stage=1"), ("mixtral", "zero.stage=3")):
            checkpoint = self.trained(family, "model.tie_embeddings=true", layout)
            out = self.folder / f"{family}-hf"
            self.convert(checkpoint, out, "--max-shard-bytes", 60000)
            self.assertTrue((out / "model.safetensors.index.json").exists())
            self.assertEqual(self.evaluated("--from-hf", out), self.evaluated("--checkpoint", checkpoint))

    def test_a_mixture_begins_with_the_loss_of_the_dense_model_that_it_is_made_of(self):
        dense, out = self.trained("llama"), self.folder / "moe"
        self.convert(dense, out, "--experts", 4, "--experts-per-token", 2, to="moe")
        config = json.loads((out / "config.json").read_text())
        self.assertEqual((config["model_type"], config["num_local_experts"], config["num_experts_per_tok"]), ("mixtral", 4, 2))
        ours, theirs = self.evaluated("--from-hf", out), self.evaluated("--checkpoint", dense)
        self.assertEqual(ours["tokens"], theirs["tokens"])
        self.assertLess(abs(ours["loss"] - theirs["loss"]), 5e-6 * theirs["loss"])
        other = self.convert(dense, self.folder / "none", "--experts", 1, to="moe", expect=2)
        self.assertIn("--experts-per-token = 2: expected 1 to --experts = 1", self.refusal(other))
        for flags, to, said in ((("--experts", 65537), "moe", "--experts = 65537: expected 1 to 65536"), (("--seed", -1), "moe", "--seed = -1"),
                                (("--experts", 4), "hf", "--experts: says what mixture"), (("--seed", 4), "hf", "--seed: says what mixture")):
            self.assertIn(said, self.refusal(self.convert(dense, self.folder / "none", *flags, to=to, expect=2)))

    @unittest.skipIf(transformers is None, "transformers is not installed")
    def test_transformers_loads_what_was_trained(self):
        for family in ("llama", "gpt2", "mixtral"):
            checkpoint = self.trained(family)
            out, dump = self.folder / f"{family}-hf", self.folder / f"{family}.safetensors"
            self.convert(checkpoint, out)
            done = run("eval", "--checkpoint", checkpoint, "--file", self.folder / "held_out.txt", "--tokenizer", "byte", "--seq-len", 32, "--dump-logits", dump)
            self.assertEqual(done.returncode, 0, done.stderr)
            model, info = transformers.AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
            self.assertFalse(info["missing_keys"] or info["unexpected_keys"] or info["mismatched_keys"], info)
            tokens = torch.tensor([list((self.folder / "held_out.txt").read_bytes()[:32])])
            with torch.no_grad():
                theirs = model.eval()(tokens).logits.numpy()
            ours = safetensors(dump)["logits"]
            self.assertEqual(ours.shape, theirs.shape)
            self.assertLess(numpy.abs(ours - theirs).max(), 1e-4 * numpy.abs(theirs).max())

    def test_refusals(self):
        checkpoint = self.trained()
        out = self.folder / "hf"
        self.convert(checkpoint, out, "--dtype", "bf16")
        self.assertEqual(json.loads((out / "config.json").read_text())["dtype"], "bfloat16")
        self.assertIn("exists already", self.refusal(self.convert(checkpoint, out, expect=2)))
        (self.folder / "dangling").symlink_to("nowhere")
        self.assertIn("exists already", self.refusal(self.convert(checkpoint, self.folder / "dangling", expect=2)))
        self.assertIn("no valid checkpoint", self.refusal(self.convert(self.folder / "nothing", self.folder / "other", expect=2)))
        (self.folder / "file").write_text("")
        self.assertIn("cannot be written", self.refusal(self.convert(checkpoint, self.folder / "file" / "hf", expect=2)))


if __name__ == "__main__":
    unittest.main()
