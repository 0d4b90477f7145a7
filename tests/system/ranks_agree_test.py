"""Ranks that were told different things refuse before they train or read: each with exit 2, the setting, its values and who has them."""

import json
import shutil
import socket
import subprocess
import unittest

from support import SystemTest, TESSERA, english, environment, metrics, run


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


class RanksAgree(SystemTest):
    def start(self, *commands):
        """One rank for each command line, as torchrun's variables start them; returns the finished processes."""
        port = free_port()
        ranks = [subprocess.Popen([TESSERA, *map(str, command)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                                  env=environment(RANK=str(rank), WORLD_SIZE=str(len(commands)), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(len(commands)),
                                                  MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)))
                 for rank, command in enumerate(commands)]
        done = [rank.communicate(timeout=120) for rank in ranks]
        return [subprocess.CompletedProcess([], rank.returncode, *out) for rank, out in zip(ranks, done)]

    def command(self, recipe, *more):
        return ["train", recipe, "--set", f"log.dir={self.folder / 'log'}", "--set", "run.steps=4", "--set", "comm.timeout_s=30", *more]

    def refused(self, expect, *commands):
        for done in self.start(*commands):
            self.assertIn(expect, self.refusal(done))

    def test_a_recipe_that_was_edited_on_one_host_trains_nothing(self):
        other = self.write_recipe("edited.toml")
        other.write_text(other.read_text().replace("lr = 1e-3", "lr = 0.3"))
        self.refused("optim.lr = 0.001 on ranks 0, 2, 0.3 on rank 1: all ranks of a run need the same", *map(self.command, (self.recipe, other, self.recipe)))
        self.assertFalse((self.folder / "log" / "metrics.jsonl").exists())

    def test_settings_of_one_rank_alone(self):
        for setting, text in (("run.steps=5", "run.steps = 4 on rank 0, 5 on rank 1"), ("zero.stage=3", "zero.stage = 0 on rank 0, 3 on rank 1"),
                              ("model.dropout=0.5", "model.dropout = 0.0 on rank 0, 0.5 on rank 1"), ("checkpoint.every=1", "checkpoint.every = 0 on rank 0")):
            with self.subTest(setting):
                self.refused(text, self.command(self.recipe), self.command(self.recipe, "--set", setting))

    def test_what_decides_which_collectives_are_called(self):
        """Over Gloo, whose connections end the process where two ranks call different ones."""
        gloo = self.command(self.recipe, "--set", "comm.backend=gloo", "--set", "comm.timeout_s=10")
        for alone, text in ((f"checkpoint.dir={self.folder / 'ckpt'}", "checkpoint.dir = not set on rank 0, set on rank 1"),
                            ("comm.check=true", "comm.check = false on rank 0, true on rank 1"),
                            ("comm.backend=auto", "comm.backend = gloo on rank 0, auto on rank 1")):
            with self.subTest(alone):
                self.refused(text, gloo, [*gloo, "--set", alone])

    def test_texts_are_told_apart_by_what_they_hold(self):
        english(self.folder / "other.txt", seed=5)
        self.refused("data.files = content ", self.command(self.recipe), self.command(self.recipe, "--set", f"data.files={self.folder / 'other.txt'}"))
        moved = self.folder / "moved"
        moved.mkdir()
        shutil.copy(self.folder / "text.txt", moved / "same.txt")
        done = self.start(self.command(self.recipe), self.command(self.recipe, "--set", f"data.files={moved / 'same.txt'}", "--set", f"log.dir={moved / 'log'}",
                                                                  "--set", "run.memory_limit_bytes=1000000000"))
        self.assertEqual([each.returncode for each in done], [0, 0], done[0].stderr + done[1].stderr)
        self.assertEqual(len(metrics(self.folder / "log")), 4)

    def test_readers_agree_too(self):
        self.train("saved", sets=[f"checkpoint.dir={self.folder / 'ckpt'}", "run.steps=4"])
        read = ["eval", "--checkpoint", self.folder / "ckpt", "--file", self.folder / "held_out.txt", "--json", "--seq-len"]
        self.refused("--seq-len = 16 on rank 0, 32 on rank 1", [*read, 16], [*read, 32])
        both = self.start([*read, 16], [*read, 16])
        self.assertEqual([each.returncode for each in both], [0, 0], both[0].stderr)
        self.assertGreater(json.loads(both[0].stdout)["loss"], 1)
        generate = ["generate", "--checkpoint", self.folder / "ckpt", "--max-tokens", 2, "--set", "mesh.tp=2", "--prompt"]
        self.refused('--prompt = "a" on rank 0, "b" on rank 1', [*generate, "a"], [*generate, "b"])

    def test_hosts_whose_folders_end_texts_elsewhere_generate_alike(self):
        self.train("saved", sets=[f"checkpoint.dir={self.folder / 'ckpt'}", "run.steps=4"])
        here, there = self.folder / "here", self.folder / "there"
        self.assertEqual(run("convert", self.folder / "ckpt", here, "--to", "hf").returncode, 0)
        shutil.copytree(here, there)
        generate = ["generate", "--tokenizer", "byte", "--max-tokens", 20, "--temperature", 0, "--prompt", "a",
                    "--set", "mesh.tp=2", "--set", "comm.timeout_s=30"]
        whole = self.start([*generate, "--from-hf", here], [*generate, "--from-hf", there])
        text = whole[0].stdout
        self.assertEqual(whole[1].returncode, 0, whole[1].stderr)
        (here / "generation_config.json").write_text(json.dumps({"eos_token_id": ord(text[9])}))
        ended = self.start([*generate, "--from-hf", here], [*generate, "--from-hf", there])
        self.assertEqual([each.returncode for each in ended], [0, 0], ended[0].stderr + ended[1].stderr)
        self.assertEqual(ended[0].stdout, "a" + text[1:].split(text[9])[0] + "\n")

    @unittest.skipUnless(shutil.which("mpirun"), "no mpirun")
    def test_two_programs_of_one_mpirun(self):
        each = ["-n", "1", TESSERA, *map(str, self.command(self.recipe))]
        done = subprocess.run(["mpirun", *each, ":", *each, "--set", "optim.lr=0.3"], capture_output=True, text=True, timeout=120,
                              env=environment(OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1", OMPI_MCA_rmaps_base_oversubscribe="1"))
        self.assertEqual(done.returncode, 2, done.stderr)
        self.assertIn("optim.lr = 0.001 on rank 0, 0.3 on rank 1", done.stderr)


if __name__ == "__main__":
    unittest.main()
