"""LoRA and QLoRA by the command: trained in a layout, resumed in another, evaluated, written as an adapter and merged, and planned with their bytes."""

import json
import unittest

from support import SystemTest, run

MODULES = "layers.*.attention.*, layers.*.feed_forward.*"


class Lora(SystemTest):
    def command(self, *arguments, expect=0):
        done = run(*arguments)
        self.assertEqual(done.returncode, expect, done.stderr)
        return done

    def evaluated(self, *source):
        return json.loads(self.command("eval", *source, "--file", self.folder / "held_out.txt", "--tokenizer", "byte", "--seq-len", 32, "--json").stdout)["loss"]

    def trained(self, name, base, *sets):
        recipe = self.write_recipe(f"{name}.toml", family="llama", kv_heads=2)
        saved = self.folder / name
        lora = [f"lora.modules={MODULES}", "lora.rank=3", "optim.lr=0.05", f"checkpoint.dir={saved}", *base]
        self.train(f"{name}-run", nproc=2, recipe=recipe, sets=[*lora, "run.steps=3", *sets])
        self.train(f"{name}-again", nproc=1, recipe=recipe, sets=[*lora, "run.steps=5", "checkpoint.resume=latest"])
        return saved

    def test_an_adapter_is_trained_merged_and_read_back(self):
        for name, base in (("lora", []), ("qlora", [f"quantize.modules={MODULES}", "quantize.double_scales=true"])):
            saved = self.trained(name, base, "mesh.tp=2")
            loss = self.evaluated("--checkpoint", saved)
            self.assertAlmostEqual(self.evaluated("--checkpoint", saved, "--set", "mesh.tp=1"), loss)
            refused = self.command("convert", saved, self.folder / f"{name}-hf", "--to", "hf", expect=2)
            self.assertIn("--merge-lora", self.refusal(refused))
            self.command("convert", saved, self.folder / f"{name}-hf", "--to", "hf", "--merge-lora")
            self.assertLess(abs(self.evaluated("--from-hf", self.folder / f"{name}-hf") - loss), 1e-5)
            self.command("convert", saved, self.folder / f"{name}-peft", "--to", "peft")
            self.command("generate", "--checkpoint", saved, "--prompt", "The", "--max-tokens", 4)

    def test_the_plan_says_what_fewer_bits_leave(self):
        recipe = self.write_recipe("planned.toml", family="llama", kv_heads=2)
        shape = ["model.dim=128", "model.ffn_dim=256", f"lora.modules={MODULES}", "lora.rank=1"]

        def parameters(*sets):
            out = self.command("plan", recipe, "--json", *[flag for each in (*shape, *sets) for flag in ("--set", each)]).stdout
            return json.loads(out)["ranks"][0]["peak_bytes"]["params"]

        elements = 3 * (2 * 128 * 128 + 2 * 128 * 64 + 3 * 128 * 256)  # of which every row is whole blocks of 64
        whole = parameters()
        for bits, sets in ((4.5, ()), (8.5, ("quantize.format=int8",)), (4.127, ("quantize.double_scales=true",))):
            fewer = parameters(f"quantize.modules={MODULES}", *sets)
            self.assertAlmostEqual((whole - fewer) / elements * 8, 32 - bits, delta=0.002)


if __name__ == "__main__":
    unittest.main()
