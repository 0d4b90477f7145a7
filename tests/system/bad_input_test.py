"""Every refusal is one line that names the knob, its value and the way out; exit 2; nothing is overwritten."""

import bz2
import gzip
import json
import lzma
import os
import shutil
import subprocess
import unittest

from support import SOURCE, SystemTest, TESSERA, english, environment, metrics, run


class BadInput(SystemTest):
    def refused(self, *sets, nproc=1, expect=(), recipe=None):
        log = self.folder / "refused"
        log.mkdir(exist_ok=True)
        (log / "metrics.jsonl").write_text('{"step": 1}\n')
        done, _ = self.train("refused", nproc=nproc, sets=sets, expect=2, recipe=recipe)
        line = self.refusal(done)
        for word in expect:
            self.assertIn(word, line)
        self.assertEqual((log / "metrics.jsonl").read_text(), '{"step": 1}\n', "a refused run must not overwrite")

    def test_unknown_key_names_the_nearest(self):
        self.refused("model.layer=3", expect=["model.layer", "layers"])

    def test_unknown_section(self):
        self.refused("modle.dim=3", expect=["modle", "model"])

    def test_wrong_type(self):
        self.refused("model.dim=wide", expect=["model.dim", "integer"])

    def test_unknown_value(self):
        self.refused("optim.name=adamm", expect=["optim.name", "adamm", "adamw"])

    def test_mesh_product(self):
        self.refused("mesh.dp_replicate=3", nproc=2, expect=["3", "2"])

    def test_global_size_not_a_multiple(self):
        self.refused("batch.global_size=7", expect=["batch.global_size", "7", "2"])

    def test_fewer_micro_batches_than_ranks(self):
        self.refused("batch.global_size=2", nproc=2, expect=["batch.global_size", "2"])

    def test_sequence_longer_than_the_model(self):
        self.refused("model.max_seq_len=16", expect=["data.seq_len", "max_seq_len"])

    def test_a_default_is_not_blamed_for_the_key_that_it_follows(self):
        self.refused("data.seq_len=0", expect=["data.seq_len = 0: expected at least 1"])
        for seed in (-1, 2**63):
            self.refused(f"run.seed={seed}", expect=[f"run.seed = {seed}"])

    def test_dp_shard_without_a_stage(self):
        self.refused("mesh.dp_shard=2", nproc=2, expect=["mesh.dp_shard", "zero.stage"])

    def test_paths_that_cannot_be_reached(self):
        first, second = self.folder / "first", self.folder / "second"
        first.symlink_to(second)
        second.symlink_to(first)
        dangling = self.folder / "dangling"
        dangling.symlink_to("nowhere")
        for key in ("log.dir", "checkpoint.dir"):
            self.refused(f"{key}={dangling}", expect=[f"{key} = {dangling}: is a link to a folder that does not exist; make that, or name another {key}"])
        (self.folder / "real").mkdir()
        (self.folder / "linked").symlink_to("real")
        for saves, name in (("ckpt", "step-00000002"), ("ckpt/", ".tmp-step-00000002"), ("ckpt", "set-aside-1/log"), ("linked/", "step-00000002/log")):
            logs = self.folder / ("real" if saves == "linked/" else "ckpt") / name
            done = run("train", self.recipe, "--set", f"checkpoint.dir={self.folder}/{saves}", "--set", f"log.dir={logs}")
            self.assertIn(f"log.dir = {logs}: lies in a folder that saves into checkpoint.dir", self.refusal(done))
        loop = ["Too many levels of symbolic links", str(first)]
        self.refused(f"checkpoint.dir={first}", expect=["checkpoint.dir = ", *loop])
        self.refused(f"model.from_hf={first}", expect=loop)
        self.refused(f"data.files={first}", expect=loop)
        text = self.folder / "text.txt"
        text.write_text("text " * 100)
        for command in (["inspect", first], ["convert", first, self.folder / "out", "--to", "hf"], ["generate", "--checkpoint", first, "--prompt", "a"],
                        ["eval", "--checkpoint", first, "--file", text, "--seq-len", "8", "--json"], ["plan", first], ["train", first],
                        ["train", self.recipe, f"--memory-report={first}"]):
            with self.subTest(command=command[0]):
                done = run(*map(str, command))
                line = self.refusal(done)
                for word in loop:
                    self.assertIn(word, line)
        self.refused("checkpoint.dir=" + 300 * "n", expect=["checkpoint.dir = ", "File name too long"])

    def test_missing_text(self):
        self.refused("data.files=[\"nowhere.txt\"]", expect=["nowhere.txt"])

    def test_empty_text(self):
        (self.folder / "empty.txt").write_text("")
        self.refused(f"data.files=[\"{self.folder / 'empty.txt'}\"]", expect=["empty.txt", "0 windows"])

    def test_what_is_compressed_or_utf16_is_no_text(self):
        plain = (self.folder / "text.txt").read_bytes()
        for name, content, words in (("pile.jsonl.zst", b"\x28\xb5\x2f\xfd" + plain, "is zstd data"), ("text.xz", lzma.compress(plain), "is xz data"),
                                     ("text.bz2", bz2.compress(plain), "is bzip2 data"), ("zipped.txt", gzip.compress(plain), "is gzip data"),
                                     ("book.txt", plain.decode().encode("utf-16"), "a text is UTF-8"), ("plain.gz", plain, "is no gzip data")):
            file = self.folder / name
            file.write_bytes(content)
            self.refused(f'data.files=["{file}"]', expect=[f"data.files: {file}: ", words])
        self.refused(f'data.validation_files=["{file}"]', expect=[f"data.validation_files: {file}: "])
        self.assertIn("is xz data", self.refusal(run("tokenize", "--train", "--vocab-size", 300, self.folder / "text.xz", "-o", self.folder / "none.model")))

    def test_short_text_says_how_many_windows(self):
        english(self.folder / "short.txt", words=12)
        self.refused(f"data.files=[\"{self.folder / 'short.txt'}\"]", expect=["window"])

    def test_tokenizer_larger_than_the_vocabulary(self):
        self.refused("model.vocab_size=100", expect=["model.vocab_size", "100", "256"])

    def test_heads(self):
        self.refused("model.heads=5", expect=["heads", "5"])

    def test_broken_toml_names_the_line(self):
        path = self.folder / "broken.toml"
        path.write_text("[model]\ndim = = 3\n")
        self.refused(recipe=path, expect=["broken.toml", "2"])

    def test_missing_recipe(self):
        done = run("train", self.folder / "none.toml")
        self.assertIn("none.toml", self.refusal(done))

    def test_unknown_flag(self):
        self.assertEqual(run("train", self.recipe, "--nprocs", 2).returncode, 2)

    def test_techniques_of_later_builds_are_refused_by_name(self):
        self.refused("mesh.ep=2", nproc=2, expect=["mesh.ep"])
        self.refused("mesh.tp=2", "model.heads=1", "model.kv_heads=1", nproc=2, expect=["mesh.tp = 2", "model.heads = 1"])
        self.refused("tensor.sequence_parallel=true", nproc=2, expect=["tensor.sequence_parallel", "mesh.tp"])

    def test_checkpoint_folder_that_cannot_be_written(self):
        for nproc in (1, 2):
            self.refused(f"checkpoint.dir={self.folder / 'text.txt' / 'saved'}", nproc=nproc, expect=["checkpoint.dir", "nothing can be written there", "Not a"])

    def test_model_beyond_the_hosts_memory(self):
        for nproc in (1, 2):
            self.refused("model.vocab_size=1000000000", nproc=nproc, expect=["96.0 B parameters", "16.0 bytes", f"the {nproc} rank", "on this host, and it has"])
        self.refused("model.vocab_size=1000000000", "offload.optimizer=disk", expect=["offload.dir = ", "offload.optimizer = disk takes", "are free"])
        self.refused("batch.global_size=10000000", "batch.micro_size=10000000", "offload.activations=disk",
                     expect=["offload.dir = ", "offload.activations = disk takes", "are free; name a folder with more space, or set offload.activations = host"])

    def test_hugging_face_folder_that_is_none(self):
        self.refused(f"model.from_hf={self.folder}", expect=["config.json"])

    def test_paths_that_no_checkpoint_could_keep(self):
        folder = os.fsencode(self.folder) + b"/not utf-8 \xff"
        os.mkdir(folder)
        for name in ("run.toml", "text.txt", "held_out.txt"):
            shutil.copyfile(self.folder / name, os.path.join(folder, os.fsencode(name)))
        done = subprocess.run([TESSERA, "train", "run.toml", "--set", f"checkpoint.dir={self.folder / 'saved'}"], cwd=folder, env=environment(), timeout=60,
                              capture_output=True)
        self.assertEqual(done.returncode, 2, done.stderr)
        self.assertIn(b"data.files", done.stderr.splitlines()[-1])
        self.assertIn(b"is not UTF-8", done.stderr.splitlines()[-1])

    def test_what_is_no_regular_file(self):
        pipe = self.folder / "pipe"
        os.mkfifo(pipe)
        for knob in ("data.files", "data.validation_files", "data.tokenizer", "comm.table"):
            for path in (pipe, self.folder):
                if (knob, path) != ("comm.table", self.folder):
                    self.refused(f"{knob}={path}", nproc=2, expect=[knob, str(path)])

    def test_validation_text_is_blamed_under_its_own_name(self):
        self.refused("data.validation_files=nowhere.txt", expect=["data.validation_files", "nowhere.txt", "no such file"])

    def test_a_text_is_not_overwritten_by_what_is_made_from_it(self):
        text = self.folder / "text.txt"
        before = text.read_bytes()
        model = self.folder / "text.model"
        model.write_bytes(before)
        for arguments in (("--tokenizer", "byte", text, "-o", self.folder / "." / "text.txt"), ("--train", "--vocab-size", 300, model, "-o", self.folder / "text")):
            self.assertIn("would be overwritten", self.refusal(run("tokenize", *arguments)))
        self.assertEqual([text.read_bytes(), model.read_bytes()], [before, before])
        for arguments in (("--tokenizer", "byte"), ("--train", "--vocab-size", 300)):
            (self.folder / "folder.model").mkdir(exist_ok=True)
            self.assertIn("--output", self.refusal(run("tokenize", *arguments, text, "-o", self.folder / "folder.model")))
        self.assertFalse(list(self.folder.glob("*.partial")))

    def test_what_is_written_takes_the_place_of_files_alone(self):
        text, pipe, model = self.folder / "text.txt", self.folder / "pipe.model", self.folder / "m.model"
        os.mkfifo(pipe)
        self.train("log", sets=[f"checkpoint.dir={self.folder / 'ckpt'}", "run.steps=3"])
        commands = (("tokenize", "--tokenizer", "byte", text, "-o"), ("tokenize", "--train", "--vocab-size", 300, text, "-o"),
                    ("eval", "--checkpoint", self.folder / "ckpt", "--file", self.folder / "held_out.txt", "--seq-len", 32, "--dump-logits"))
        for command in commands:
            with self.subTest(command=command[:2]):
                self.assertIn(f"= {pipe}: is a device, a pipe or a socket", self.refusal(run(*command, pipe)))
                self.assertTrue(pipe.is_fifo())
                self.assertIn(f"there is no folder {self.folder / 'none'}", self.refusal(run(*command, self.folder / "none" / "x.model")))
                self.assertFalse((self.folder / "none").exists())
                target, link = self.folder / "target", self.folder / "link.model"
                link.symlink_to("target")
                for _ in range(2):  # a link to nothing, then to a file
                    self.assertEqual(run(*command, link).returncode, 0)
                    self.assertTrue(link.is_symlink() and target.stat().st_size > 0)
                link.unlink()
                target.unlink()
                if "--train" in command:  # which adds .model to a name
                    continue
                with open(target, "wb") as out:  # in whose place the command would put another file
                    done = subprocess.run([TESSERA, *map(str, command), "/dev/stdout"], env=environment(), stdout=out, stderr=subprocess.PIPE, text=True)
                self.assertIn("= /dev/stdout: is what a process has open, and not the name of a file", self.refusal(done))
                target.unlink()
        self.assertIn("is a device, a pipe", self.refusal(run("train", self.recipe, f"--memory-report={pipe}")))
        self.assertFalse(list(self.folder.glob("*.partial")))

    def test_a_link_among_the_files_of_a_run_stays_one(self):
        _, log = self.train("log", sets=["run.steps=3", "optim.warmup_steps=0"])
        files = {name: self.folder / f"linked-{name}" for name in ("metrics.jsonl", "validation.jsonl", "written_by.json", "config.toml")}
        for name, target in files.items():
            (log / name).rename(target)
            (log / name).symlink_to(target)
        files["metrics.jsonl"].unlink()  # a link to nothing yet
        before = files["written_by.json"].read_text()
        self.train("log", sets=["run.steps=4", "optim.warmup_steps=0"])
        for name, target in files.items():
            self.assertTrue((log / name).is_symlink() and not target.is_symlink(), name)
        self.assertEqual(len(metrics(log)), 4)
        self.assertIn("steps = 4", files["config.toml"].read_text())
        self.assertNotEqual(files["written_by.json"].read_text(), before)

    def test_what_a_command_reads_is_not_overwritten(self):
        own = self.folder / "config.toml"
        own.write_text("# mine\n" + self.recipe.read_text())
        before = own.read_bytes()
        self.assertIn("log.dir = ", self.refusal(run("train", own, "--set", f"log.dir={self.folder}")))
        self.assertIn("would be overwritten", self.refusal(run("train", own, f"--memory-report={own}")))
        self.assertIn("would be overwritten", self.refusal(run("train", own, f"--memory-report={self.folder / 'text.txt'}")))
        self.assertEqual(own.read_bytes(), before)

    def files_of_a_plan(self):
        """A configuration that names a schedule's file, a device's and a framework's."""
        table = self.folder / "mine.csv"
        self.assertEqual(run("schedule", "1f1b", "--stages", 2, "--micro-batches", 4, "--csv", table).returncode, 0)
        files = {"schedule": table}
        for kind, source in (("device", "hardware/h100.toml"), ("framework", "frameworks/torchtitan.toml")):
            files[kind] = self.folder / f"{kind}.toml"
            shutil.copyfile(SOURCE / "tessera" / "plan" / source, files[kind])
        return files

    def test_a_plan_overwrites_nothing_that_it_reads(self):
        files = self.files_of_a_plan()
        sets = ("--set", "mesh.pp=2", "--set", f"pipeline.schedule={files['schedule']}", "--world", 2)
        read = [self.recipe, self.folder / "text.txt", *files.values()]
        before = [path.read_bytes() for path in read]
        device = ("--device", files["device"])
        for path in read:
            for flags in (("--report",), ("--trace",), ("--search", "-o"), ("--curve", "memory", "--svg")):
                framework = () if flags[0] in ("--search", "--curve") else ("--framework", files["framework"])
                if framework or path != files["framework"]:
                    with self.subTest(path=path.name, flags=flags):
                        self.assertIn(f"= {path}: is what this command reads", self.refusal(run("plan", self.recipe, *sets, *device, *framework, *flags, path)))
        self.assertEqual([path.read_bytes() for path in read], before)
        one = self.folder / "one.html"
        self.assertIn("is where --report is written, too", self.refusal(run("plan", self.recipe, *device, "--search", "--report", one, "-o", one)))
        self.assertFalse(one.exists())

    def test_no_other_command_overwrites_what_it_reads_or_writes_besides(self):
        log, picture = self.folder / "log", self.folder / "picture"
        log.mkdir()
        (log / "timeline.jsonl").write_text("{}\n")
        timed = ("1f1b", "--stages", 2, "--micro-batches", 4, "--costs", log)
        self.assertIn("is what this command reads", self.refusal(run("schedule", *timed, "--svg", log / "timeline.jsonl")))
        self.assertIn("is where --svg is written, too", self.refusal(run("trace", log, "--svg", picture, "--trace", picture)))
        self.assertIn("is where --table is written, too", self.refusal(run("bench", "comm", "--table", picture, "--svg", picture)))
        self.assertIn("its own config.toml", self.refusal(run("train", self.recipe, "--set", f"log.dir={log}", f"--memory-report={log / 'config.toml'}")))
        ckpt = self.folder / "ckpt"
        self.train("saved", sets=[f"checkpoint.dir={ckpt}", "run.steps=3"])
        done = run("convert", ckpt, ckpt / "step-00000003" / "out", "--to", "hf")
        self.assertIn("lies in the checkpoint", self.refusal(done))
        self.assertEqual(run("convert", ckpt, self.folder / "hf", "--to", "hf").returncode, 0)
        plain = self.recipe.read_text().split("[data]")
        self.recipe.write_text(f"[model]\nfrom_hf = '{self.folder / 'hf'}'\n[data]" + plain[1])
        done = run("train", self.recipe, "--dump-step", 1, "--dump-dir", self.folder / "hf")
        self.assertIn("--dump-dir = ", self.refusal(done))
        self.assertIn("is what this command reads", done.stderr)

    def test_names_that_are_no_text_end_no_json(self):
        files = self.files_of_a_plan()
        for kind, path in files.items():
            files[kind] = path.rename(path.with_name(f"{kind}\udcff{path.suffix}"))
        recipe = self.folder / "run\udcff.toml"
        shutil.copyfile(self.recipe, recipe)
        layouts, page = self.folder / "layouts.jsonl", self.folder / "page.html"
        layouts.write_text('{"world": 1}\n')
        plan, device = ("plan", self.recipe), ("--device", files["device"])
        for command in ((*plan, *device, "--json"), (*plan, *device, "--layouts", layouts), (*plan, "--framework", files["framework"], "--json"),
                        ("plan", recipe, "--json"), ("plan", recipe, "--explain", "--json"), ("schedule", files["schedule"], "--json")):
            with self.subTest(command=[ascii(str(word)) for word in command[1:]]):
                done = run(*command)
                self.assertEqual(done.returncode, 0, done.stderr)
                json.loads(done.stdout)
        self.assertEqual(run(*plan, *device, "--report", page).returncode, 0)
        self.assertEqual(run("schedule", files["schedule"], "--json", "--trace", page).returncode, 0)
        json.loads(page.read_text())

    def test_a_plan_says_what_train_would_refuse(self):
        for setting in ("optim.groups=nosuch: lr=1", "quantize.modules=nosuch"):
            done = run("plan", self.recipe, "--set", setting, "--set", "lora.modules=layers.**")
            self.assertEqual(done.returncode, 0, done.stderr)
            self.assertRegex(done.stdout, "train would refuse this: " + setting.split("=")[0] + ".*'nosuch'")

    def test_lines_of_layouts_and_what_they_leave_out(self):
        layouts = self.folder / "layouts.jsonl"
        for line, said in (('{"world": 2, "sets": []}', 'line 1 has "sets", which is none of'), ('{"all_reduce": 8, "set": []}', "beside set")):
            layouts.write_text(line + "\n")
            self.assertIn(said, self.refusal(run("plan", self.recipe, "--layouts", layouts)))
        layouts.write_text('{"world": 8, "all_reduce": 9223372036854775807}\n{"world": 1048576, "all_reduce": 1000000000000000}\n')
        done = run("plan", self.recipe, "--device", "h100", "--layouts", layouts)
        beyond, most = map(json.loads, done.stdout.splitlines())
        self.assertIn("all_reduce = 9223372036854775807", beyond["refused"])
        self.assertGreater(most["seconds"], 1000)
        for flags in (("--report", self.folder / "r.html"), ("--tokens", "1T"), ("--world", 4)):
            self.assertIn(flags[0], self.refusal(run("plan", self.recipe, "--device", "h100", "--layouts", layouts, *flags)))
        self.assertIn("--events", self.refusal(run("plan", self.recipe, "--json", "--events", "--explain")))

    def test_what_a_framework_holds_is_held_against_the_device(self):
        said = {}
        for limit in (10**7, 10**10):
            flags = ("plan", self.recipe, "--framework", "megatron-lm", "--set", f"run.memory_limit_bytes={limit}")
            answer = json.loads(run(*flags, "--json").stdout)
            said[limit] = answer["fits"]
            self.assertEqual(answer["fits"], answer["reserved_bytes"] + answer["context_bytes"] <= limit)
            text = run(*flags).stdout
            self.assertRegex(text, "framework .* reserved and .* of contexts")
            self.assertEqual("do not fit" in text, not answer["fits"])
        self.assertEqual(said, {10**7: False, 10**10: True})

    def test_a_configuration_is_a_file(self):
        pipe = self.folder / "pipe.toml"
        os.mkfifo(pipe)
        self.assertIn("is not a regular file; write it to one", self.refusal(run("train", pipe)))
        self.assertIn("is not a regular file; write it to one", self.refusal(run("plan", pipe)))
        for flag in ("--device", "--framework", "--layouts"):
            self.assertIn("is not a regular file", self.refusal(run("plan", self.recipe, flag, pipe)))
        layouts = self.folder / "layouts.jsonl"
        for content, said in ((b"", "is empty"), (b'{"world": 1}\n\xff\xfe\n', "line 2 is no layout")):
            layouts.write_bytes(content)
            self.assertIn(said, self.refusal(run("plan", self.recipe, "--layouts", layouts)))
        self.refused("batch.global_size=0", "batch.per_rank=4", "batch.micro_size=0", expect=["batch.micro_size = 0"])

    def test_what_a_run_saves_is_what_it_was_asked_for(self):
        """batch.per_rank is each data rank's, however many there are."""
        _, log = self.train("two", nproc=2, sets=["batch.global_size=0", "batch.per_rank=2", "run.steps=4"])
        saved = log / "config.toml"
        self.assertIn("per_rank = 2\n", saved.read_text())
        _, log = self.train("four", nproc=4, sets=[], recipe=saved)
        self.assertIn("per_rank = 2\n", (log / "config.toml").read_text())

    def test_a_configuration_that_no_run_saved_is_kept(self):
        log = self.folder / "log"
        log.mkdir()
        (log / "config.toml").write_text("# mine\n")
        done = run("train", self.recipe, "--set", f"log.dir={log}", "--set", "run.steps=3")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("kept in config.toml.kept-1", done.stderr)
        self.assertEqual((log / "config.toml.kept-1").read_text(), "# mine\n")
        again = run("train", self.recipe, "--set", f"log.dir={log}", "--set", "run.steps=3")
        self.assertEqual(again.returncode, 0, again.stderr)
        self.assertFalse((log / "config.toml.kept-2").exists())
        saved = (log / "config.toml").read_text()
        self.assertIn("offload.dir", self.refusal(run("train", self.recipe, "--set", f"log.dir={log}", "--set", "offload.activations=disk",
                                                      "--set", "offload.dir=/proc/nowhere")))
        self.assertEqual((log / "config.toml").read_text(), saved)

    def test_flags_are_blamed_for_what_is_wrong_with_them(self):
        step = self.refusal(run("train", self.recipe, "--dump-step", 0, "--dump-dir", self.folder / "d"))
        self.assertIn("--dump-step = 0: steps are numbered from 1", step)
        late = ("--set", "offload.optimizer=host", "--set", "offload.delayed_update=true")
        step = self.refusal(run("train", self.recipe, "--dump-step", 1, "--dump-dir", self.folder / "d", *late))
        self.assertIn("--dump-step = 1: with offload.delayed_update = true the update of a step runs while the next one computes", step)
        done = run("convert", self.folder, self.folder / "out", "--to", "hf", "--set", "lora.alpha=3")
        self.assertIn("--set lora.alpha=3: a checkpoint is written as it was trained", self.refusal(done))
        seed = self.refusal(run("generate", "--checkpoint", self.folder, "--prompt", "a", "--seed", 2**63))
        self.assertIn("--seed: 9223372036854775808 is beyond 64 bits: expected an integer of at most 9223372036854775807", seed)
        self.assertIn("trian: no such command; did you mean train?", self.refusal(run("trian", self.recipe)))
        self.assertIn("--bogus: no such flag", self.refusal(run("--bogus")))
        text = self.folder / "text.txt"
        self.assertIn("vocab-size = -5", self.refusal(run("tokenize", text, "--train", "--vocab-size", -5)))
        self.assertIn("--tokenizer = nope", self.refusal(run("tokenize", text, "--tokenizer", "nope")))
        trained = run("tokenize", text, "--train", "--vocab-size", 300, "--bos", "--documents", "lines", "-o", self.folder / "flags.model")
        for flag in ("--bos", "--documents"):
            self.assertIn(f"{flag}: has no effect with --train", trained.stderr)
        self.assertIn("--sample-bytes = -10", self.refusal(run("tokenize", text, "--train", "--vocab-size", 300, "--sample-bytes", -10)))
        for port in (65536, 95526):
            self.assertIn(f"--master-port = {port}: a port, 1 to 65535", self.refusal(run("run", "--master-port", port, "--", "true")))
        self.assertIn("--output = .: is a folder", self.refusal(run("tokenize", text, "--train", "--vocab-size", 300, "-o", ".")))
        self.assertIn("is not a regular file", self.refusal(run("tokenize", "/dev/zero", "--train", "--vocab-size", 300, timeout=20)))

    def test_settings_without_effect_are_said_once(self):
        for nproc in (1, 2):
            done, _ = self.train("idle", nproc=nproc, sets=["optim.momentum=0.9", "checkpoint.keep=2", "run.steps=3"])
            self.assertEqual(done.stderr.count("optim.momentum = 0.9: has no effect with optim.name = adamw"), 1, done.stderr)
            self.assertEqual(done.stderr.count("held_out.txt\"]: has no effect without run.validate_every"), 1, done.stderr)
            self.assertEqual(done.stderr.count("has no effect"), 3, done.stderr)

    def test_folders_and_numbers_that_cannot_be(self):
        done, _ = self.train("dump", "--dump-step", 1, "--dump-dir", self.folder / "text.txt" / "dump", expect=2)
        self.assertIn("--dump-dir", self.refusal(done))
        self.assertIn("--nproc = 99999999999: is no value", self.refusal(run("train", self.recipe, "--nproc", 99999999999)))
        self.assertIn("--seed = -1: it must be at least 0", self.refusal(run("generate", "--checkpoint", self.folder, "--prompt", "a", "--seed", -1)))
        self.assertIn("--nproc-per-node = 1000000000", self.refusal(run("run", "--nproc-per-node", 10**9, "true")))

    def test_flags_that_nothing_would_look_at(self):
        both = run("inspect", self.folder, "device")
        self.assertIn("is not looked at beside", self.refusal(both))
        self.assertEqual(both.stdout, "")
        generate = ("generate", "--checkpoint", self.folder, "--prompt", "a")
        self.assertIn("--temperature = inf", self.refusal(run(*generate, "--temperature", "inf")))
        self.assertIn("seed beyond 64 bits", self.refusal(run(*generate, "--seed", 2**63 - 1, "--samples", 2)))
        for flags in (("-o", self.folder / "none" / "x.toml"), ("--nproc", 0)):
            self.assertIn(flags[0].replace("-o", "--output"), self.refusal(run("bench", "device", "--seconds", 30, *flags)))

    def test_the_last_line_says_what_is_wrong_with_the_flags(self):
        self.assertIn("--prompt is required", self.refusal(run("generate", "--checkpoint", self.folder)))
        self.assertIn("--world: is given 3 times; give it once", self.refusal(run("plan", self.recipe, *(3 * ("--world", 2)))))
        self.assertIn("an argument is empty", self.refusal(run("train", self.recipe, "--memory-report", "")))
        sizes = ("--dim", 64, "--layers", 2, "--iterations", 1, "--device", "cpu:x")
        self.assertIn("--device = cpu:x", self.refusal(run("bench", "pp", "--schedule", "zb_auto", *sizes)), "the schedule itself is taken")
        self.assertIn("--nproc = 0: 1 times no all-reduces", self.refusal(run("bench", "device", "--nproc", 0)))

    def test_values_of_flags_are_there_and_decimal(self):
        step = ("train", self.recipe, "--dump-step")
        generate = ("generate", "--checkpoint", self.folder, "--prompt", "a")
        for flags in (step, (*generate, "--top-k"), (*generate, "--temperature"), (*generate, "--seed"), ("plan", self.recipe, "--patience"),
                      ("plan", self.recipe, "--device", "h100", "--devices-per-node"), ("trace", self.folder, "--step"), ("trace", self.folder, "--rank"),
                      ("convert", self.folder, self.folder / "out", "--seed"), ("schedule", "1f1b", "--group"), ("tokenize", "a", "--sample-bytes")):
            with self.subTest(flags=flags):
                self.assertIn(f"{flags[-1]}: is empty: give a value", self.refusal(run(*flags, "")))
        for value in ("010", "0x2", "1e3", "+2", " 2", "2.0"):
            for flag in ("--nproc", "--dump-step"):
                self.assertIn(f"{flag}: {value}: expected an integer in decimal digits", self.refusal(run("train", self.recipe, flag, value)))
        self.assertIn("--temperature: 0x1: expected a decimal number", self.refusal(run(*generate, "--temperature", "0x1")))
        self.assertIn("--hidden: 0x40: expected an integer", self.refusal(run("bench", "pp", "--hidden", "64,0x40")))

    def test_a_file_that_cannot_be_read_is_named_with_the_reason(self):
        broken = "/proc/self/mem"  # a regular file, whose beginning nobody may read
        said = f"{broken}: cannot be read: Input/output error"
        for knob in ("data.files", "data.tokenizer", "comm.table"):
            self.refused(f"{knob}={broken}", expect=[knob if knob != "data.files" else "", said])
        text = self.folder / "text.txt"
        for command in (("train", broken), ("plan", self.recipe, "--device", broken), ("plan", self.recipe, "--framework", broken),
                        ("plan", self.recipe, "--layouts", broken), ("tokenize", text, "--tokenizer", broken, "-o", self.folder / "out.bin"),
                        ("bench", "device", "--from", broken, "--svg", self.folder / "a.svg"), ("trace", broken)):
            with self.subTest(command=command):
                self.assertIn(said, self.refusal(run(*command)))
        sealed = self.folder / "sealed.csv"
        sealed.symlink_to(broken)
        self.assertIn(f"{sealed}: cannot be read: Input/output error", self.refusal(run("schedule", sealed)))
        for flags in (("plan", self.recipe, "--framework"), ("plan", self.recipe, "--device"), ("bench", "device", "--svg", self.folder / "a.svg", "--from")):
            line = self.refusal(run(*flags, self.recipe))
            self.assertIn(f"{flags[-1]} = {self.recipe}: name is missing; expected a file such as those of tessera/plan", line)

    def test_what_a_terminal_would_obey_is_shown(self):
        for command in (("train", self.recipe, "--set", "data.tokenizer=\x1b[31mred"), ("train", "\x1b[31mred"), ("plan", self.recipe, "--world", "\x1b[31mred")):
            line = self.refusal(run(*command))
            self.assertIn("\\x1b[31mred", line)
            self.assertNotIn("\x1b", line)

    def test_numbers_of_ranks_are_those_that_were_asked_for(self):
        layouts = self.folder / "layouts.jsonl"
        worlds = (2**32 + 2, -(2**32) + 2, 2**64 - 1, 0)
        layouts.write_text("".join(json.dumps({"world": world}) + "\n" for world in worlds))
        done = run("plan", self.recipe, "--layouts", layouts)
        self.assertEqual([json.loads(line)["refused"] for line in done.stdout.splitlines()],
                         [f"--layouts: world = {world}: expected a whole number from 1 to 1048576" for world in worlds])
        for curve in (("memory",), ("ranks", "--device", "h100")):
            self.assertIn("--world = 1: a curve goes up to 2 ranks at least", self.refusal(run("plan", self.recipe, "--world", 1, "--curve", *curve)))
        axes = "dp_replicate=65536,tp=65536,pp=65536,cp=65536"  # of which 64 bits hold nothing
        self.assertIn("which takes at most 256", self.refusal(run("verify", self.recipe, "--mesh", axes)))


if __name__ == "__main__":
    unittest.main()
