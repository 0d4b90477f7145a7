"""LoRA and QLoRA by the command: trained in a layout, resumed in another, evaluated, written as an adapter and merged, and planned with their bytes."""

import json
import resource
import subprocess
import unittest

from support import SystemTest, TESSERA, environment, metrics, run

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
            self.assertAlmostEqual(self.evaluated("--checkpoint", saved, "--set", "mesh.tp=1", "--set", "run.seed=70"), loss)
            refused = self.command("convert", saved, self.folder / f"{name}-hf", "--to", "hf", expect=2)
            self.assertIn("--merge-lora", self.refusal(refused))
            self.command("convert", saved, self.folder / f"{name}-hf", "--to", "hf", "--merge-lora")
            self.assertLess(abs(self.evaluated("--from-hf", self.folder / f"{name}-hf") - loss), 1e-5)
            self.command("convert", saved, self.folder / f"{name}-peft", "--to", "peft")
            self.command("generate", "--checkpoint", saved, "--prompt", "The", "--max-tokens", 1, "--top-k", 1)

    def test_an_adapter_that_cannot_be_read_starts_no_ranks(self):
        recipe = self.write_recipe("recipe.toml", family="llama", kv_heads=2)
        for folder, why in (("gone", "there is no such folder"), ("", "holds no adapter_config.json")):
            sets = [f"lora.modules={MODULES}", f"lora.from_peft={self.folder / folder}"]
            done, _ = self.train("run", nproc=2, recipe=recipe, sets=sets, expect=2)
            self.assertIn(why, self.refusal(done))

    def test_what_cannot_be_made_again_is_refused(self):
        recipe = self.write_recipe("base.toml", family="llama", kv_heads=2)
        sets = ["run.steps=3", f"checkpoint.dir={self.folder / 'base'}"]
        self.train("base-run", recipe=recipe, sets=sets)
        lora = [f"lora.modules={MODULES}", "run.steps=5"]
        partial = ["checkpoint.partial=['**.lora_a','**.lora_b']", f"checkpoint.resume={self.folder / 'base' / 'step-00000003'}"]
        adapted, groups = self.folder / "adapted", 'optim.groups=["norm: weight_decay = 0"]'
        done, _ = self.train("adapted-run", nproc=2, recipe=recipe, sets=[*lora, *partial, groups, f"checkpoint.dir={adapted}"])
        self.assertEqual(done.stderr.count('"norm: weight_decay = 0": has no effect, as all that it is of is frozen'), 1, done.stderr)
        refused = self.refusal(self.command("convert", adapted, self.folder / "adapter", "--to", "peft", expect=2))
        self.assertIn("the whole model was trained, too", refused)
        self.assertIn("--to hf --merge-lora", refused)
        done, _ = self.train("quantized-run", recipe=recipe, sets=[*lora, *partial, f"quantize.modules={MODULES}"], expect=2)
        self.assertIn("name that folder as model.from_hf", self.refusal(done))

        hf, saved = self.folder / "hf", self.folder / "qlora"
        self.command("convert", self.folder / "base", hf, "--to", "hf")
        plain = recipe.read_text().split("[data]")
        recipe.write_text(f"[model]\nfrom_hf = '{hf}'\n[data]" + plain[1])
        qlora = [*lora, f"quantize.modules={MODULES}", f"checkpoint.dir={saved}"]
        self.train("from-hf-run", recipe=recipe, sets=qlora)
        loss = self.evaluated("--checkpoint", saved)
        self.command("convert", saved, self.folder / "merged", "--to", "hf", "--merge-lora")
        self.assertLess(abs(self.evaluated("--from-hf", self.folder / "merged") - loss), 1e-5)
        whole, kept = self.folder / "whole", self.folder / "kept"
        self.train("whole-run", recipe=recipe, sets=[*lora, f"checkpoint.dir={whole}"])
        kept.mkdir()
        for file in hf.iterdir():
            (kept / file.name).write_bytes(file.read_bytes())
        (hf / "model.safetensors").write_bytes((self.folder / "merged" / "model.safetensors").read_bytes())
        done = self.command("eval", "--checkpoint", saved, "--file", self.folder / "held_out.txt", "--tokenizer", "byte", "--seq-len", 32, expect=2)
        self.assertIn("was trained beside other weights", self.refusal(done))
        done = self.command("convert", saved, self.folder / "merged-again", "--to", "hf", "--merge-lora", expect=2)
        self.assertIn("was trained beside other weights", self.refusal(done))
        there = ("--set", f"model.from_hf={kept}")
        self.command("convert", saved, self.folder / "merged-again", "--to", "hf", "--merge-lora", *there)
        for checkpoint, said in ((saved, "was trained beside other weights"), (whole, "were trained beside")):
            out = self.folder / f"{checkpoint.name}-peft"
            self.assertIn(said, self.refusal(self.command("convert", checkpoint, out, "--to", "peft", expect=2)))
            self.command("convert", checkpoint, out, "--to", "peft", *there)
            self.assertEqual(json.loads((out / "adapter_config.json").read_text())["base_model_name_or_path"], str(kept))
            gone = self.command("convert", checkpoint, self.folder / f"{checkpoint.name}-gone", "--to", "peft", "--set", "model.from_hf=nowhere")
            self.assertIn("so the adapters name none", gone.stderr)
            config = json.loads((self.folder / f"{checkpoint.name}-gone" / "adapter_config.json").read_text())
            self.assertIsNone(config["base_model_name_or_path"])

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

    def test_what_is_frozen_is_a_weight_alone_to_the_systems_limit(self):
        """101 M parameters would keep 16 bytes each, 1.5 GiB, and with LoRA keep 4; four times as many keep too much but in fewer bits."""
        limit = 1500 * 10**6

        def bounded_run(tag, *sets):
            def bounded():
                resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))

            sets = ("model.dim=1024", "model.layers=6", "model.kv_heads=4", "model.ffn_dim=4096", "data.seq_len=16", "batch.global_size=1", "batch.micro_size=1",
                    "run.steps=1", "optim.warmup_steps=0", "run.validate_every=0", f"log.dir={self.folder / tag}", *sets)
            return subprocess.run([TESSERA, "train", self.recipe, *(word for one in sets for word in ("--set", one))], env=environment(), timeout=300,
                                  capture_output=True, text=True, preexec_fn=bounded)
        lora, larger = (f"lora.modules={MODULES}", "lora.rank=3"), "model.layers=24"
        self.assertIn("keeps 16.0 bytes on a rank", self.refusal(bounded_run("whole")))
        self.assertRegex(self.refusal(bounded_run("larger", *lora, larger)),
                         r"keeps 4\.\d+ bytes on average, most of them frozen \(lora\.modules\), on a rank .* a process may have 1\.40 GiB .*"
                         r"fewer bits for what is frozen \(quantize\.modules\)")
        narrow = bounded_run("narrow", *lora, larger, f"quantize.modules={MODULES}", f"checkpoint.resume={self.folder / 'nowhere'}")
        self.assertIn("checkpoint.resume = ", self.refusal(narrow), "which comes after memory")
        done = bounded_run("adapted", *lora)
        self.assertEqual(done.returncode, 0, done.stderr[-3000:])
        self.assertEqual(len(metrics(self.folder / "adapted")), 1)


if __name__ == "__main__":
    unittest.main()
