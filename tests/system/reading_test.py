"""What `eval` and `generate` take a model by: its tokenizer as it was, a checkpoint of the step that its name says, numbers that are numbers."""

import json
import re
import shutil
import struct
import subprocess
import unittest

import numpy

from support import SystemTest, TESSERA, english, environment, run


def with_value(path, tensor, value):
    """Sets the first element of a tensor (F32) of a safetensors file."""
    data = bytearray(path.read_bytes())
    (size,) = struct.unpack("<Q", data[:8])
    begin = 8 + size + json.loads(data[8 : 8 + size])[tensor]["data_offsets"][0]
    data[begin : begin + 4] = numpy.float32(value).tobytes()
    path.write_bytes(data)


def letters_model(path, letters):
    """Writes a SentencePiece model of characters (a serialized ModelProto) that cannot spell any others: ids 0 unknown, 1 and 2 the ends of a text."""
    field = lambda number, data: bytes([number << 3 | 2, len(data)]) + data
    piece = lambda text, kind: field(1, field(1, text.encode()) + b"\x15" + struct.pack("<f", -1.0) + bytes([0x18, kind]))
    pieces = [piece("<unk>", 2), piece("<s>", 3), piece("</s>", 3), *(piece("\u2581" if letter == " " else letter, 1) for letter in letters)]
    path.write_bytes(b"".join(pieces) + field(2, b"\x18\x04") + field(3, field(1, b"identity") + b"\x18\x00\x20\x00\x28\x01"))


class Reading(SystemTest):
    def saved(self, *sets):
        folder = self.folder / "ckpt"
        self.train("log", sets=[f"checkpoint.dir={folder}", "run.steps=4", *sets])
        return folder

    def eval(self, *source, **extra):
        return run("eval", *source, "--file", self.folder / "held_out.txt", "--seq-len", 32, "--micro-size", 16, "--json", **extra)

    def test_a_tokenizer_that_changed_is_refused_and_another_is_said_to_be(self):
        model, kept = self.folder / "t.model", self.folder / "kept.model"
        make = lambda text: self.assertEqual(run("tokenize", "--train", "--vocab-size", 300, self.folder / text, "-o", model).returncode, 0)
        make("text.txt")
        shutil.copy(model, kept)
        ckpt = self.saved(f"data.tokenizer={model}", "model.vocab_size=300")
        whole = json.loads(self.eval("--checkpoint", ckpt).stdout)
        english(self.folder / "other.txt", seed=9)
        make("other.txt")
        prompt = ("generate", "--checkpoint", ckpt, "--prompt", "the", "--max-tokens", 3)
        for done in (self.eval("--checkpoint", ckpt), run(*prompt)):
            line = self.refusal(done)
            self.assertIn(f"data.tokenizer = {model}: is not the tokenizer that", line)
            self.assertIn("--tokenizer", line)
        same = self.eval("--checkpoint", ckpt, "--tokenizer", kept)
        self.assertEqual([json.loads(same.stdout), same.stderr.count("is not the tokenizer")], [whole, 0], same.stderr)
        for done in (self.eval("--checkpoint", ckpt, "--tokenizer", model, "--nproc", 2), self.eval("--checkpoint", ckpt, "--tokenizer", "byte")):
            self.assertEqual([done.returncode, done.stderr.count("is not the tokenizer")], [0, 1], done.stderr)

    def test_what_a_tokenizer_cannot_spell_and_what_makes_no_window_is_said(self):
        model, foreign, packed = self.folder / "letters.model", self.folder / "foreign.txt", self.folder / "foreign.bin"
        letters_model(model, "etaoinshrdlu .\n")
        foreign.write_text("the \u4e2d" * 400)  # five ids each
        sets = [f"data.tokenizer={model}", "model.vocab_size=300", "run.steps=2", "optim.warmup_steps=0"]
        done, _ = self.train("log", nproc=2, sets=[f"checkpoint.dir={self.folder / 'ckpt'}", f"data.validation_files={foreign}", "run.validate_every=2", *sets])
        said = [done.stderr.count(words) for words in ("are the unknown id", "20% of the tokens of data.validation_files (400 of 2000)")]
        self.assertEqual(said, [1, 1], done.stderr)
        done, _ = self.train("foreign-log", sets=[f"data.files={foreign}", "checkpoint.dir=", *sets])
        self.assertIn("20% of the tokens of data.files (400 of 2000)", done.stderr)
        done = run("tokenize", "--tokenizer", model, foreign, "-o", packed)
        self.assertEqual([done.returncode, done.stderr.count("20% of the tokens (400 of 2000)")], [0, 1], done.stderr)
        for file in (foreign, packed):
            done = run("eval", "--checkpoint", self.folder / "ckpt", "--file", file, "--seq-len", 32, "--json", "--nproc", 2)
            found = json.loads(done.stdout)
            self.assertEqual([found["tokens"], found["unknown_tokens"], found["tokens_left_out"]], [1984, 397, 15])
            self.assertEqual(done.stderr.count("20% of the tokens of --file (397 of 1984)"), 1, done.stderr)
            self.assertEqual(done.stderr.count("the last 15 of the tokens of --file make no whole window of --seq-len = 32"), 1, done.stderr)
        prompts = [run("generate", "--checkpoint", self.folder / "ckpt", "--prompt", prompt, "--max-tokens", 1, "--nproc", 2, "--set", "mesh.tp=2")
                   for prompt in ("the \u4e2d", "the ")]
        sentence = "1 of the 5 tokens of --prompt are the unknown id"
        self.assertEqual([(done.returncode, done.stderr.count(sentence), done.stderr.count("unknown id")) for done in prompts], [(0, 1, 1), (0, 0, 0)])
        spelled = self.folder / "spelled.txt"
        spelled.write_text("that is. " * 71 + "on")  # 641 ids: 20 whole windows of 32
        done = run("eval", "--checkpoint", self.folder / "ckpt", "--file", spelled, "--seq-len", 32, "--json")
        self.assertEqual(sorted(json.loads(done.stdout)), ["bits_per_byte", "loss", "tokens"])
        self.assertEqual([done.stderr.count("unknown"), done.stderr.count("left out")], [0, 0], done.stderr)

    def test_a_key_that_makes_another_model_is_said_with_both_values(self):
        ckpt = self.saved()
        whole = self.eval("--checkpoint", ckpt)
        self.assertNotIn("another model", whole.stderr)
        for read in (self.eval("--checkpoint", ckpt, "--nproc", 2, "--set", "model.rope_theta=500"),
                     run("generate", "--checkpoint", ckpt, "--prompt", "the", "--max-tokens", 1, "--set", "model.rope_theta=500")):
            self.assertEqual(read.stderr.count("was trained with model.rope_theta = 10000.0; this is another model, with 500.0"), 1, read.stderr)
            self.assertEqual(read.stderr.count("another model"), 1, read.stderr)

    def test_a_folder_brings_its_tokenizer_and_says_how_a_text_begins(self):
        model, hf = self.folder / "t.model", self.folder / "hf"
        self.assertEqual(run("tokenize", "--train", "--vocab-size", 300, self.folder / "text.txt", "-o", model).returncode, 0)
        converted, remark = run("convert", self.saved(f"data.tokenizer={model}", "model.vocab_size=300"), hf, "--to", "hf"), "was trained with data.bos = true"
        self.assertEqual((converted.returncode, remark in converted.stderr), (0, False), converted.stderr)
        config = json.loads((hf / "config.json").read_text())
        self.assertEqual((config["bos_token_id"], config["eos_token_id"]), (1, 2))
        shutil.copy(model, hf / "tokenizer.model")
        plain = json.loads(self.eval("--from-hf", hf).stdout)
        (hf / "tokenizer_config.json").write_text('{"add_bos_token": true}')
        begun = json.loads(self.eval("--from-hf", hf).stdout)
        self.assertNotEqual(begun, plain)
        self.assertEqual(json.loads(self.eval("--from-hf", hf, "--set", "data.bos=false").stdout), plain)
        packed = self.folder / "held_out.bin"
        self.assertEqual(run("tokenize", "--tokenizer", model, "--bos", self.folder / "held_out.txt", "-o", packed).returncode, 0)
        flags = ("--from-hf", hf, "--seq-len", 32, "--micro-size", 16, "--json")
        self.assertEqual(json.loads(run("eval", "--file", packed, *flags).stdout), begun)
        self.assertIn("--bos: the tokenizer (byte)", self.refusal(run("tokenize", "--tokenizer", "byte", "--bos", self.folder / "held_out.txt")))
        prompt_tokens = []  # as is said of a prompt that the model cannot see whole
        for sets in ((), ("--set", "data.bos=false")):
            words = [TESSERA, "generate", "--from-hf", hf, "--prompt", "etaoin shrdlu " * 9, "--max-tokens", "1", *sets]
            done = subprocess.run(words, capture_output=True, env=environment())  # a model that learned little writes any bytes
            self.assertEqual(done.returncode, 0, done.stderr)
            prompt_tokens.append(int(re.search(rb"--prompt has (\d+) tokens", done.stderr)[1]))
        self.assertEqual(prompt_tokens[0], prompt_tokens[1] + 1)

        recipe, ckpt = self.folder / "from_hf.toml", self.folder / "adapted"
        text = self.recipe.read_text().split("[data]")[1].replace('tokenizer = "byte"\n', "")
        recipe.write_text(f"[model]\nfrom_hf = '{hf}'\n[data]{text}")
        done, log = self.train("adapted-log", nproc=2, recipe=recipe, sets=[f"checkpoint.dir={ckpt}", "run.steps=3"])
        said = [done.stderr.count(line) for line in ("is the tokenizer that is taken", "puts id 1 in front of a text")]
        self.assertEqual(said, [1, 1], done.stderr)
        self.assertIn(f'tokenizer = "{hf / "tokenizer.model"}"', (log / "config.toml").read_text())
        (hf / "tokenizer_config.json").unlink()  # a run goes on as it began, and is read so
        self.train("on-log", recipe=recipe, sets=[f"checkpoint.dir={ckpt}", "checkpoint.resume=latest", "run.steps=4"])
        self.assertNotEqual(self.eval("--checkpoint", ckpt).stdout, self.eval("--checkpoint", ckpt, "--set", "data.bos=false").stdout)
        (hf / "generation_config.json").write_text('{"eos_token_id": 2}')
        converted = run("convert", ckpt, self.folder / "again", "--to", "hf")
        self.assertEqual((converted.returncode, converted.stderr.count(remark)), (0, 1), converted.stderr)  # by which no file of it goes
        self.assertIn("--set data.bos=true", converted.stderr)
        self.assertEqual((self.folder / "again" / "generation_config.json").read_text(), '{"eos_token_id": 2}')

        def converted(source, name):
            done, files = run("convert", source, self.folder / name, "--to", "hf"), self.folder / name
            self.assertEqual(done.returncode, 0, done.stderr)
            generation = files / "generation_config.json"
            return json.loads((files / "config.json").read_text()), generation.exists() and json.loads(generation.read_text()), done.stderr

        (hf / "generation_config.json").write_text('{"eos_token_id": 299, "top_k": 7}')
        config, generation, _ = converted(ckpt, "both")
        self.assertEqual([config["bos_token_id"], config["eos_token_id"], generation], [1, [2, 299], {"eos_token_id": [2, 299], "top_k": 7}])
        other, foreign = self.folder / "other.model", self.folder / "foreign"
        self.assertEqual(run("tokenize", "--train", "--vocab-size", 290, self.folder / "text.txt", "-o", other).returncode, 0)
        self.train("foreign-log", recipe=recipe, sets=[f"checkpoint.dir={foreign}", f"data.tokenizer={other}", "run.steps=4"])
        config, generation, _ = converted(foreign, "foreign-hf")
        self.assertEqual([config["bos_token_id"], config["eos_token_id"], generation], [1, 2, False], "by another tokenizer, 299 stands for other text")
        (hf / "tokenizer.model").rename(self.folder / "away.model")
        for number, (vocabulary, ends) in enumerate((({"<s>": 1, "th": 2}, 2), ({"<s>": 1, "</s>": 2}, [2, 299]))):
            (hf / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocabulary}}))
            config, generation, _ = converted(foreign, f"json-{number}-hf")
            self.assertEqual([config["eos_token_id"], generation and generation["eos_token_id"]], [ends, ends != 2 and ends], vocabulary)
        (hf / "tokenizer.json").unlink()
        (self.folder / "away.model").rename(hf / "tokenizer.model")
        other.unlink()
        config, generation, said = converted(foreign, "unknown-hf")
        self.assertEqual([config["bos_token_id"], config["eos_token_id"], generation], [None, None, False])
        self.assertIn("config.json is written without the ids", said)
        (hf / "tokenizer.model").rename(self.folder / "away.model")  # where the folder brings none, its ids are taken
        config, generation, said = converted(ckpt, "kept-hf")
        self.assertEqual([config["eos_token_id"], generation["eos_token_id"], said.count("without the ids")], [2, 299, 0])
        (hf / "tokenizer.json").write_text('{"model": {"vocab": {"<s>": 1}}}')  # which nobody can hold against a tokenizer that is gone
        config, generation, said = converted(ckpt, "gone-hf")
        self.assertEqual([config["eos_token_id"], generation, said.count("without the ids")], [None, False, 1])

    def test_a_loss_that_is_no_number_is_none(self):
        exported = self.folder / "hf"
        self.assertEqual(run("convert", self.saved(), exported, "--to", "hf").returncode, 0)
        with_value(exported / "model.safetensors", "model.norm.weight", float("nan"))
        source = ("--from-hf", exported, "--tokenizer", "byte")
        for nproc in (1, 2):
            done = self.eval(*source, "--nproc", nproc)
            self.assertIn("norm.weight holds weights that are not", self.refusal(done))
            found = json.loads(done.stdout, parse_constant=lambda word: self.fail(f"{word} is not JSON"))
            self.assertEqual([found["loss"], found["bits_per_byte"]], [None, None])
        text = run("eval", *source, "--file", self.folder / "held_out.txt", "--seq-len", 32)
        self.assertEqual([text.returncode, text.stdout], [2, ""])

    def test_patterns_and_copies_in_vain_are_not_passed_over(self):
        exported = self.folder / "hf"
        self.assertEqual(run("convert", self.saved(), exported, "--to", "hf").returncode, 0)
        source = ("--from-hf", exported, "--tokenizer", "byte", "--set")
        generate = ("generate", "--prompt", "a", "--max-tokens", 1, *source)
        for done in (self.eval(*source, "quantize.modules=nosuch"), run(*generate, "quantize.modules=nosuch")):
            self.assertIn("quantize.modules = 'nosuch': no module matches", self.refusal(done))
        done = run(*generate, "lora.modules=layers.**")
        self.assertEqual([done.returncode, done.stderr.count("lora.modules = layers.**: has no effect")], [0, 1], done.stderr)
        self.assertIn("so many copies of the model would share", self.refusal(self.eval(*source[:-1], "--nproc", 100000)))

    def test_a_validation_loss_that_is_no_number_is_said_to_be_none(self):
        """The held-out text has a byte that the training text lacks, and the embedding of that byte is damaged."""
        exported = self.folder / "hf"
        self.assertEqual(run("convert", self.saved("model.tie_embeddings=false"), exported, "--to", "hf").returncode, 0)
        data = bytearray((exported / "model.safetensors").read_bytes())
        (size,) = struct.unpack("<Q", data[:8])
        begin = 8 + size + json.loads(data[8 : 8 + size])["model.embed_tokens.weight"]["data_offsets"][0] + 1 * 48 * 4
        data[begin : begin + 4] = numpy.float32("nan").tobytes()
        (exported / "model.safetensors").write_bytes(data)
        (self.folder / "held_out.txt").write_text("some text \x01 of another kind " * 20)
        done, log = self.train("run", sets=[f"model.from_hf={exported}", "run.steps=4", "run.validate_every=2"])
        self.assertEqual(done.stderr.count("the validation loss is not finite"), 2, done.stderr)
        self.assertEqual([json.loads(line)["loss"] for line in (log / "validation.jsonl").read_text().splitlines()], [None, None])

    def test_a_folder_is_not_believed_by_its_name(self):
        ckpt = self.saved("checkpoint.every=1", "run.steps=4")
        shutil.copytree(ckpt / "step-00000002", ckpt / "step-00000050")
        text = f"passing over {ckpt / 'step-00000050'}: holds step 2, whatever its name says"
        newest, evaluated = self.eval("--checkpoint", ckpt / "step-00000004"), self.eval("--checkpoint", ckpt)
        self.assertEqual([evaluated.stdout, evaluated.stderr.count(text)], [newest.stdout, 1], evaluated.stderr)
        inspected = run("inspect", ckpt, "--json")
        self.assertEqual([json.loads(inspected.stdout)["step"], inspected.stderr.count(text)], [4, 1])
        (self.folder / "alone").mkdir()
        shutil.copytree(ckpt / "step-00000002", self.folder / "alone" / "step-00000050")
        self.assertIn("holds no valid checkpoint; ", line := self.refusal(run("inspect", self.folder / "alone")))
        self.assertIn("holds step 2, whatever its name says", line)
        done, _ = self.train("log", sets=[f"checkpoint.dir={ckpt}", "run.steps=6", "checkpoint.every=1", "checkpoint.keep=2", "checkpoint.resume=latest"])
        self.assertEqual(done.stderr.count(text), 1, done.stderr)
        self.assertEqual(sorted(path.name for path in ckpt.iterdir()), ["set-aside-1", "step-00000005", "step-00000006"])

    def test_beyond_the_memory_that_they_may_have(self):
        ckpt = self.saved()
        limit = ("--set", "run.memory_limit_bytes=150000")
        for done, way in ((self.eval("--checkpoint", ckpt, *limit), "smaller --micro-size"),
                          (run("generate", "--checkpoint", ckpt, "--prompt", "the", *limit), "fewer --prompt")):
            line = done.stderr.strip().splitlines()[-1]
            self.assertEqual(done.returncode, 1, line)
            for word in ("run.memory_limit_bytes = 150000", "in use", way, "mesh.tp", "raise the limit"):
                self.assertIn(word, line)

    def test_settings_that_say_nothing_to_a_reader_are_said_to(self):
        ckpt = self.saved()
        idle = ("--set", "optim.lr=0.5", "--set", "data.seq_len=8", "--set", "run.threads=1")
        for done in (self.eval("--checkpoint", ckpt, *idle, "--nproc", 2), run("generate", "--checkpoint", ckpt, "--prompt", "the", "--max-tokens", 2, *idle)):
            self.assertEqual(done.returncode, 0, done.stderr)
            for text in ("optim.lr = 0.5: has no effect on a model that is only read", "data.seq_len = 8: has no effect"):
                self.assertEqual(done.stderr.count(text), 1, done.stderr)
            self.assertNotIn("run.threads", done.stderr)
        self.assertIn("optim.lr = -1", self.refusal(self.eval("--checkpoint", ckpt, "--set", "optim.lr=-1")))

    def test_experts_choose_among_as_many_windows_as_they_were_trained_with(self):
        ckpt = self.saved("model.family=mixtral", "model.experts=4", "model.experts_per_token=2", "model.router=expert_choice", "batch.micro_size=4")
        flags = ("eval", "--checkpoint", ckpt, "--file", self.folder / "held_out.txt", "--seq-len", 32, "--json")
        usual, idle, other = run(*flags), run(*flags, "--set", "batch.micro_size=1"), run(*flags, "--micro-size", 1)
        self.assertEqual([usual.returncode, idle.stdout, idle.stderr.count("batch.micro_size = 1: has no effect")], [0, usual.stdout, 1], idle.stderr)
        self.assertEqual([done.stderr.count("it was trained, and validated, with batch.micro_size = 4") for done in (usual, idle, other)], [0, 0, 1])
        self.assertNotEqual(json.loads(other.stdout)["loss"], json.loads(usual.stdout)["loss"])


if __name__ == "__main__":
    unittest.main()
