"""Standard streams that are closed, full or cut: nothing that belongs on the console gets into a file, and no result is lost without a word."""

import fcntl
import json
import os
import resource
import shutil
import subprocess
import time
import unittest

from support import SystemTest, TESSERA, environment, metrics, run


def close_streams():
    os.closerange(0, 3)


def small_files():
    resource.setrlimit(resource.RLIMIT_FSIZE, (20000, 20000))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


class Console(SystemTest):
    def train_as(self, tag, nproc, prepare, *sets):
        log, saved = self.folder / f"{tag}-log", self.folder / f"{tag}-saved"
        flags = [x for s in (f"log.dir={log}", f"checkpoint.dir={saved}", f"data.cache_dir={self.folder / tag}", "run.steps=4", *sets) for x in ("--set", s)]
        done = subprocess.run([TESSERA, "train", self.recipe, "--nproc", str(nproc), *flags], env=environment(), timeout=120, preexec_fn=prepare,
                              stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        return done.returncode, log, saved

    def test_closed_streams_leave_files_alone(self):
        for nproc in (1, 2):
            code, log, saved = self.train_as(f"closed{nproc}", nproc, close_streams, "run.validate_every=2", "checkpoint.every=1")
            self.assertEqual(code, 0)
            self.assertEqual([line["step"] for line in metrics(log)], [1, 2, 3, 4])
            validations = (log / "validation.jsonl").read_text().splitlines()
            self.assertEqual([json.loads(line)["step"] for line in validations], [2, 4], "progress is no record")
            self.assertEqual(sorted(path.name for path in saved.iterdir()), [f"step-{step:08}" for step in (1, 2, 3, 4)], "and no lock is left")
            found = json.loads(run("inspect", saved, "--json").stdout)
            self.assertTrue(found["valid"], found["problem"])

    def test_a_result_that_cannot_be_printed_is_a_failure(self):
        _, _, saved = self.train_as("full", 1, None)
        text = ("--file", self.folder / "held_out.txt", "--seq-len", 32, "--json")
        commands = (("--version",), ("schedule", "--help"), ("schedule", "--list"), ("plan", self.recipe, "--json"), ("eval", "--checkpoint", saved, *text), ("generate", "--checkpoint", saved, "--prompt", "the", "--max-tokens", 3), ("inspect", saved))
        for command in commands:
            with open("/dev/full", "w") as full:
                done = subprocess.run([TESSERA, *map(str, command)], env=environment(), timeout=120, stdout=full, stderr=subprocess.PIPE, text=True)
            self.assertEqual(done.returncode, 1, command)
            self.assertRegex(done.stderr.splitlines()[-1], "standard output cannot be written: No space left on device; .* make room, and run this again$")

    def test_what_is_written_besides_is_not_asked_for_again(self):
        _, _, saved = self.train_as("beside", 1, None)
        out = self.folder / "beside-hf"
        with open("/dev/full", "w") as full:
            done = subprocess.run([TESSERA, "convert", saved, out, "--to", "hf"], env=environment(), timeout=120, stdout=full, stderr=subprocess.PIPE, text=True)
        self.assertEqual(done.returncode, 1)
        self.assertIn(f"standard output cannot be written: No space left on device; {out} is written, and whole", done.stderr)
        self.assertNotIn("again", done.stderr)
        self.assertTrue((out / "model.safetensors").exists())

    def test_a_closed_output_takes_no_result(self):
        _, _, saved = self.train_as("lost", 1, None)
        for command in (("inspect", saved), ("eval", "--checkpoint", saved, "--file", self.folder / "held_out.txt", "--seq-len", 32, "--nproc", 2)):
            done = subprocess.run([TESSERA, *map(str, command)], env=environment(), timeout=120, preexec_fn=lambda: os.close(1), stderr=subprocess.PIPE, text=True)
            self.assertEqual(done.returncode, 1, command)
            self.assertRegex(done.stderr, "standard output cannot be written: Bad file descriptor; .* give it an output that can be written")

    def test_files_that_may_not_grow_end_no_training(self):
        self.train_as("cut", 1, None, "checkpoint.dir=")  # packs the text
        code, log, saved = self.train_as("cut", 1, small_files, "run.steps=60")
        self.assertEqual(code, 1, "the last save failed; no signal ended the run")
        kept = metrics(log)
        self.assertGreater(len(kept), 5)
        self.assertEqual([line["step"] for line in kept], list(range(1, len(kept) + 1)))
        self.assertEqual(list(saved.iterdir()), [], "what was written in part is gone")

    def test_a_console_that_goes_ends_no_job(self):
        script = "for i in 1 2 3 4 5 6 7 8 9; do echo $i; sleep 0.1; done; touch " + str(self.folder / "ended")
        job = subprocess.Popen([TESSERA, "run", "--prefix", "--", "sh", "-c", script], env=environment(), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        self.assertEqual(job.stdout.readline(), b"[rank 0] 1\n")
        job.stdout.close()
        self.assertEqual(job.wait(timeout=60), 0)
        self.assertTrue((self.folder / "ended").exists())

    def test_a_console_that_takes_nothing_is_named_and_holds_up_no_end(self):
        with open("/dev/full", "w") as full:
            done = subprocess.run([TESSERA, "run", "--prefix", "--", "echo", "hi"], env=environment(), timeout=60, stdout=full, stderr=subprocess.PIPE, text=True)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("standard output: not all that rank 0 writes gets there (No space left on device)", done.stderr)
        script = f"touch {self.folder / 'begun'}; yes"
        command = [TESSERA, "run", "--nproc-per-node", "2", "--prefix", "--grace", "1", "--", "sh", "-c", script]
        job = subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        until = time.time() + 60
        while time.time() < until and not (self.folder / "begun").exists():
            time.sleep(0.1)
        time.sleep(1)  # until its pipe is full
        job.terminate()
        self.assertEqual(job.wait(timeout=60), 1)
        self.assertIn("nobody reads it", job.stderr.read())
        job.stdout.close()

    def test_a_second_live_run_in_a_log_folder_is_refused(self):
        log = self.folder / "shared"
        command = [TESSERA, "train", self.recipe, "--set", f"log.dir={log}", "--set"]
        first = subprocess.Popen([*map(str, command), "run.steps=100000"], env=environment(), stderr=subprocess.PIPE, text=True)
        until = time.time() + 60
        while time.time() < until and not ((log / "metrics.jsonl").exists() and (log / "metrics.jsonl").stat().st_size > 0):
            time.sleep(0.1)
        second = run(*command[1:], "run.steps=3")
        first.terminate()
        _, said = first.communicate(timeout=60)
        self.assertEqual(first.returncode, 0, said)
        self.assertIn("another run that still trains writes its records there", self.refusal(second))
        self.assertNotIn("are lost", said)
        alone = run(*command[1:], "run.steps=3")
        self.assertNotIn("another run", alone.stderr)

    def test_a_log_folder_is_taken_before_anything_is_written_there(self):
        log = self.folder / "taken"
        command = ("train", self.recipe, "--set", f"log.dir={log}", "--set", "run.steps=6", "--set")
        first = run(*command, "run.seed=1")
        self.assertEqual(first.returncode, 0, first.stderr)
        before = {file.name: file.read_bytes() for file in log.iterdir() if file.is_file()}
        self.assertNotIn(".log.lock", before)
        with open(log / ".log.lock", "w") as begun:  # a run that has not opened its records yet
            fcntl.flock(begun, fcntl.LOCK_EX)
            self.assertIn("another run that still trains writes its records there", self.refusal(run(*command, "run.seed=2")))
        (log / ".log.lock").unlink()
        self.assertEqual({file.name: file.read_bytes() for file in log.iterdir() if file.is_file()}, before)

    def test_too_few_open_files_are_refused_by_the_limits_name(self):
        def few():
            resource.setrlimit(resource.RLIMIT_NOFILE, (16, 16))
        for command in (("train", str(self.recipe), "--nproc", "2"), ("run", "--nproc-per-node", "2", "--", "true")):
            done = subprocess.run([TESSERA, *command], env=environment(), timeout=60, capture_output=True, text=True, preexec_fn=few)
            self.assertIn("ulimit -n = 16: ", self.refusal(done))
            self.assertEqual(sum("tessera: " in line for line in done.stderr.splitlines()), 1, done.stderr)

    def test_too_little_memory_is_said_by_the_limits_name(self):
        # Too little to map libtorch, for what it allocates while it is loaded, and for what a command does.
        command = ("tokenize", "--tokenizer", "byte", "-o", self.folder / "packed.bin", self.folder / "text.txt")
        needed = None
        for mega in range(200, 2000, 20):
            limit = mega * 1000 * 1000
            def limited():
                resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
            done = subprocess.run([TESSERA, *command], env=environment(), timeout=60, capture_output=True, text=True, preexec_fn=limited)
            if done.returncode == 0:
                needed = mega
                break
            self.assertEqual(done.returncode, 1, done.stderr)
            said = [line for line in done.stderr.splitlines() if "tessera: " in line]
            self.assertEqual(len(said), 1, done.stderr)
            self.assertIn(f"limited to {limit} bytes (RLIMIT_AS, ulimit -v)", said[0])
        self.assertIsNotNone(needed)

    def test_a_small_stack_is_raised_or_refused_by_the_limits_name(self):
        def limited(soft, hard):
            return lambda: resource.setrlimit(resource.RLIMIT_STACK, (soft << 10, hard << 10))
        refused = subprocess.run([TESSERA, "--version"], env=environment(), timeout=60, capture_output=True, text=True, preexec_fn=limited(64, 64))
        self.assertIn("the stack is limited to 64 KiB (ulimit -s)", self.refusal(refused))
        for hard in (256, 8192):
            code, log, _ = self.train_as(f"stack{hard}", 2, limited(64, hard), "checkpoint.dir=")
            self.assertEqual(code, 0)
            self.assertEqual(len(metrics(log)), 4)

    def test_threads_that_there_cannot_be_are_refused_by_the_variables_name(self):
        def told(count):
            return subprocess.run([TESSERA, "plan", self.recipe], env={**environment(), "OMP_NUM_THREADS": count}, timeout=60, capture_output=True, text=True)
        for count in ("100000", "2147483647,2", "-3", "0", "x", "2x"):
            self.assertIn(f"OMP_NUM_THREADS = {count}: expected at least 1 and at most 1024", self.refusal(told(count)))
        for count in ("", "2,1"):
            done = told(count)
            self.assertEqual((done.returncode, done.stderr), (0, ""))

    def test_a_log_folder_that_is_removed_is_told_apart_from_a_second_run(self):
        log = self.folder / "removed"
        job = subprocess.Popen([*map(str, [TESSERA, "train", self.recipe, "--set", f"log.dir={log}", "--set", "run.steps=100000"])], env=environment(),
                               stderr=subprocess.PIPE, text=True)
        until = time.time() + 60
        while time.time() < until and not ((log / "metrics.jsonl").exists() and (log / "metrics.jsonl").stat().st_size > 0):
            time.sleep(0.1)
        shutil.rmtree(log)
        job.terminate()
        _, said = job.communicate(timeout=60)
        self.assertEqual(job.returncode, 0, said)
        self.assertIn("of this run are lost: the file was removed", said)
        self.assertNotIn("another run", said)

    def test_a_working_directory_that_is_gone(self):
        gone = self.folder / "gone"
        gone.mkdir()
        done = subprocess.run(["sh", "-c", f'cd "{gone}" && rmdir "{gone}" && exec "{TESSERA}" plan "{self.recipe}"'], env=environment(), timeout=60,
                              capture_output=True, text=True)
        self.assertIn("the working directory cannot be found", self.refusal(done))


if __name__ == "__main__":
    unittest.main()
