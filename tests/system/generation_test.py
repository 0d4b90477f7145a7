"""A checkpoint of any layout is read in any other: the same text is written, and the same loss found."""

import json
import subprocess
import unittest

import numpy

from support import SystemTest, TESSERA, environment, run, safetensors

LOSSES = 5e-6  # relative


class Generation(SystemTest):
    def checkpoint(self, family, kv_heads, sets, nproc):
        def train(saved):
            recipe = self.write_recipe(f"{family}.toml", family=family, kv_heads=kv_heads)
            self.train(f"{family}-log", nproc=nproc, sets=[f"checkpoint.dir={saved}", "run.steps=40", "optim.lr=3e-3", *sets], recipe=recipe)

        return self.once(f"{family}-{nproc}", train)

    def read(self, command, saved, *arguments, nproc=1, sets=(), expect=0):
        flags = [x for s in sets for x in ("--set", s)]
        done = run(command, "--checkpoint", saved, "--nproc", nproc, *flags, *arguments)
        self.assertEqual(done.returncode, expect, done.stderr)
        return done

    def assert_read_alike(self, saved, layouts):
        greedy = ("--prompt", "the ", "--max-tokens", 40, "--temperature", 0)  # more than the context of 32
        sampled = ("--prompt", "the ", "--max-tokens", 40, "--temperature", 1, "--top-k", 5, "--seed", 3)
        text = ("--file", self.folder / "held_out.txt", "--tokenizer", "byte", "--seq-len", 32, "--micro-size", 4, "--json", "--dump-logits")

        def evaluated(nproc, sets):
            dump = self.folder / "logits.safetensors"
            loss = json.loads(self.read("eval", saved, *text, dump, nproc=nproc, sets=sets).stdout)
            return loss, safetensors(dump)["logits"]

        loss, logits = evaluated(1, ())
        texts = [self.read("generate", saved, *flags).stdout for flags in (greedy, sampled)]
        self.assertNotEqual(texts[0], texts[1])
        for text_of_one in texts:
            self.assertTrue(text_of_one.startswith("the ") and len(text_of_one) > 20, text_of_one)
        for number, (nproc, sets) in enumerate(layouts):
            other_loss, other_logits = evaluated(nproc, sets)
            # Each layout one of the two: tests/train/generation_test.cpp takes both everywhere.
            self.assertEqual(self.read("generate", saved, *(sampled, greedy)[number % 2], nproc=nproc, sets=sets).stdout, texts[1 - number % 2], sets)
            self.assertEqual(other_loss["tokens"], loss["tokens"])
            self.assertLessEqual(abs(other_loss["loss"] - loss["loss"]), LOSSES * loss["loss"], sets)
            self.assertLessEqual(numpy.abs(other_logits - logits).max(), 1e-4 * numpy.abs(logits).max(), sets)

    def test_llama_with_more_ranks_than_key_heads(self):
        saved = self.checkpoint("llama", 2, ["mesh.tp=2", "mesh.dp_shard=2", "zero.stage=3", "tensor.sequence_parallel=true"], nproc=4)
        self.assert_read_alike(saved, [(4, ["mesh.tp=4"]), (2, ["mesh.cp=2"]), (1, ["offload.params=host"])])  # others in tests/train/generation_test.cpp

    def test_stages_have_the_bits_of_one_device(self):
        saved = self.checkpoint("llama", 2, ["mesh.pp=2"], nproc=2)
        text = ("--file", self.folder / "held_out.txt", "--tokenizer", "byte", "--seq-len", 32, "--micro-size", 4, "--json", "--dump-logits")
        several = ("--prompt", "the ", "--prompt", "a", "--samples", 2, "--max-tokens", 12, "--seed", 3, "--top-k", 5)

        def results(nproc, sets):
            dump = self.folder / "logits.safetensors"
            loss = self.read("eval", saved, *text, dump, nproc=nproc, sets=sets).stdout
            return loss, safetensors(dump)["logits"].tolist(), self.read("generate", saved, *several, nproc=nproc, sets=sets).stdout

        one = results(1, ())
        self.assertEqual(results(3, ["mesh.pp=3"]), one)
        texts = one[2]
        self.assertEqual([line for line in texts.splitlines() if line.startswith("---")],
                         [f"--- prompt {prompt}, seed {seed}" for prompt in (1, 2) for seed in (3, 4)])
        alone = self.read("generate", saved, "--prompt", "a", "--max-tokens", 12, "--seed", 4, "--top-k", 5).stdout
        self.assertTrue(texts.endswith("--- prompt 2, seed 4\n" + alone), texts)

    def test_hugging_face_files_are_cut_as_they_are_read(self):
        saved, exported = self.checkpoint("llama", 2, [], nproc=1), self.folder / "exported"
        self.assertEqual(run("convert", saved, exported, "--to", "hf").returncode, 0)
        prompt = ("--prompt", "the ", "--max-tokens", 20, "--temperature", 0)
        done = run("generate", "--from-hf", exported, "--tokenizer", "byte", "--nproc", 3, "--set", "mesh.tp=3", *prompt)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(done.stdout, self.read("generate", saved, *prompt).stdout)
        text = done.stdout.removesuffix("\n")
        (exported / "generation_config.json").write_text(json.dumps({"eos_token_id": [ord(text[9]), 300]}))  # an id of its tokenizer, which is bytes
        ended = run("generate", "--from-hf", exported, "--tokenizer", "byte", "--nproc", 2, "--set", "mesh.pp=2", *prompt)
        self.assertEqual([ended.returncode, ended.stdout], [0, "the " + text[4:].split(text[9])[0] + "\n"], ended.stderr)

    def test_copies_share_the_windows_and_layers_are_cut_inside_them(self):
        saved = self.checkpoint("llama", 2, [], nproc=1)
        text = ("--file", self.folder / "held_out.txt", "--tokenizer", "byte", "--seq-len", 32, "--json")
        one, four = (json.loads(self.read("eval", saved, *text, nproc=n, sets=sets).stdout) for n, sets in ((1, ()), (4, ["mesh.tp=2"])))
        self.assertEqual(four["tokens"], one["tokens"])
        self.assertLessEqual(abs(four["loss"] - one["loss"]), LOSSES * one["loss"])

    def test_weights_are_read_in_another_format_than_they_were_trained_in(self):
        saved = self.checkpoint("llama", 2, [], nproc=1)
        text = ("--file", self.folder / "held_out.txt", "--tokenizer", "byte", "--seq-len", 32, "--json")
        wide, narrow = (json.loads(self.read("eval", saved, *text, sets=sets).stdout)["loss"] for sets in ((), ["precision.params=bf16"]))
        self.assertNotEqual(narrow, wide)
        self.assertLess(abs(narrow - wide), 0.01 * wide)
        self.read("generate", saved, "--prompt", "the ", "--max-tokens", 8, "--temperature", 0, sets=["precision.params=bf16"])

    def test_what_cannot_be_read_so_is_refused(self):
        saved = self.checkpoint("llama", 2, [], nproc=1)
        for nproc, sets, words in (
            (2, [], "mesh.dp_replicate = 2: one text is continued by one copy of the model; cut its layers over the ranks, --set mesh.tp=2"),
            (9, ["mesh.pp=9"], "mesh.pp x pipeline.virtual_stages = 9 stages: the model is a chain of"),
            (2, ["mesh.pp=2", 'pipeline.split=["layers.9"]'], "the model's chain has no link 'layers.9'"),
            (5, ["mesh.tp=5"], "mesh.tp = 5"),
        ):
            done = self.read("generate", saved, "--prompt", "the", nproc=nproc, sets=sets, expect=2)
            self.assertIn(words, self.refusal(done))

    def test_what_a_reader_refuses_before_it_computes(self):
        saved = self.checkpoint("llama", 2, [], 1)
        held_out = self.folder / "held_out.txt"
        refused = [((*flags,), words) for flags, words in (
            (("--set", "model.rope_theta=-1"), "model.rope_theta = -1"), (("--set", "model.norm_eps=-1"), "model.norm_eps = -1"),
            (("--set", "run.threads=100000"), "run.threads = 100000"), (("--set", "run.threads=0"), "run.threads = 0"),
            (("--set", "comm.timeout_s=-1"), "comm.timeout_s"), (("--dump-logits", self.folder / "none" / "x"), "--dump-logits"), (("--dump-logits", held_out), "would be overwritten"),
            (("--dump-logits", "/proc/x"), "nothing can be written in /proc"), (("--tokenizer", "nope"), "--tokenizer = nope"))]
        for flags, words in refused:
            self.assertIn(words, self.refusal(run("eval", "--checkpoint", saved, "--file", held_out, "--seq-len", 32, *flags)))
        (self.folder / "one.txt").write_text("a")
        self.assertIn("--seq-len = 32", self.refusal(run("eval", "--checkpoint", saved, "--file", self.folder / "one.txt", "--seq-len", 32)))
        self.assertIn("--file: ", self.refusal(run("eval", "--checkpoint", saved, "--file", self.folder / "none", "--seq-len", 32)))
        for flag, value in (("--temperature", "nan"), ("--temperature", -1), ("--top-k", -1), ("--top-p", 0)):
            done = run("generate", "--checkpoint", saved, "--prompt", "the", flag, value)
            self.assertIn(f"{flag} = {value}", self.refusal(done))
            self.assertEqual(done.stdout, "", "the prompt is not printed first")

    def test_a_prompt_that_is_too_long_is_said_to_be(self):
        saved = self.checkpoint("llama", 2, [], 1)
        for length, said in ((31, 0), (32, 0), (40, 1)):
            command = [TESSERA, "generate", "--checkpoint", saved, "--prompt", length * "a", "--max-tokens", "1", "--nproc", "2", "--set", "mesh.tp=2"]
            done = subprocess.run(command, capture_output=True, env=environment(), timeout=60)  # bytes that a new model makes spell no text
            sentence = f"--prompt has {length} tokens, and the model sees at most model.max_seq_len = 32 at once, those that it makes included: it goes on from the last 32 alone"
            self.assertEqual([done.returncode, done.stderr.decode().count(sentence)], [0, said], done.stderr)

    def test_more_windows_in_a_pass_than_there_are(self):
        saved = self.checkpoint("llama", 2, [], 1)
        losses = [json.loads(self.read("eval", saved, "--file", self.folder / "held_out.txt", "--seq-len", 32, "--micro-size", size, "--json").stdout)["loss"]
                  for size in (1, 10**9, 2**63 - 1)]
        self.assertGreater(losses[0], 1)
        for loss in losses:
            self.assertLessEqual(abs(loss - losses[0]), LOSSES * losses[0])


if __name__ == "__main__":
    unittest.main()
