"""The examples and the command run alone and under the real torchrun."""

import os
import pathlib
import re
import subprocess
import sys
import unittest

from support import SOURCE, SystemTest, TESSERA, environment, metrics

BUILD = pathlib.Path(os.environ.get("TESSERA_BUILD", SOURCE / "build/release"))
TOY = BUILD / "examples/toy_ddp"
TOY_FSDP = BUILD / "examples/toy_fsdp"
FEED_FORWARD = BUILD / "examples/feed_forward_tp"
ROW_COLUMN = BUILD / "examples/row_column"
PIPELINE_SPLIT = BUILD / "examples/pipeline_split"


class Examples(SystemTest):
    def command(self, *arguments):
        done = subprocess.run(list(map(str, arguments)), capture_output=True, text=True, timeout=200, env=environment())
        self.assertEqual(done.returncode, 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}")
        return done.stdout

    def test_toy_ddp_alone(self):
        self.assertRegex(self.command(TOY), r"loss")

    def torchrun(self, *arguments):
        return self.command(sys.executable, "-m", "torch.distributed.run", "--standalone", "--no-python", "--nproc-per-node", 2, *arguments)

    def test_train_under_torchrun_equals_nproc(self):
        _, ours = self.train("nproc", nproc=2, sets=["run.steps=6"])
        self.torchrun(TESSERA, "train", self.recipe, "--set", f"log.dir={self.folder / 'torchrun'}", "--set", "run.steps=6")
        losses = [[line["loss"] for line in metrics(log)] for log in (ours, self.folder / "torchrun")]
        self.assertEqual(losses[0], losses[1])

    def test_toy_ddp_under_torchrun(self):
        out = self.torchrun(TOY)
        self.assertRegex(out, r"loss")
        self.assertTrue(re.search(r"2 replicas, checksum [0-9a-f]+: equal", out), out)

    def test_toy_fsdp_holds_one_model_together(self):
        alone, two = self.command(TOY_FSDP), self.command(TESSERA, "run", "--nproc-per-node", 2, TOY_FSDP)
        self.assertIn("1 rank, 165 of 165 elements: one model", alone)
        self.assertIn("2 ranks, 165 of 165 elements: one model", two)

    def test_a_feed_forward_layer_on_a_mesh_of_eight(self):
        out = self.command(TESSERA, "run", "--nproc_per_node", 8, FEED_FORWARD)
        self.assertIn("rank 0 of 8 holds [0:22, 0:64] of w1.weight", out)
        differences = re.findall(r"(\d\.\de[+-]\d+)", out)
        self.assertEqual(len(differences), 3, out)
        self.assertLess(max(map(float, differences)), 1e-5)

    def test_rows_and_columns_alone(self):
        out = self.command(TESSERA, "run", "--nproc_per_node", 3, ROW_COLUMN)
        differences = dict(re.findall(r"(.+?) +differs from one device by (\S+)", out))
        wrong = float(differences.pop("row-wise, relu before the sum (wrong)"))
        self.assertGreater(wrong, 0.1)
        self.assertEqual(len(differences), 4)
        self.assertLess(max(map(float, differences.values())), 1e-5)

    def test_a_model_in_two_stages(self):
        graph = self.command(PIPELINE_SPLIT, "--print")
        self.assertTrue(graph.startswith("Model in 2 stages\nstage 0: "), graph)
        self.assertIn("\n  sends relu after 'layers.0.fc' to stage 1: float32 [4, 3], 48 B, and gets its gradient\nstage 1: ", graph)
        alone, two = self.command(PIPELINE_SPLIT), self.command(TESSERA, "run", "--nproc-per-node", 2, PIPELINE_SPLIT)
        for out in alone, two:
            self.assertIn(graph, out)
        self.assertIn("2 stages on 1 rank: losses equal the whole model's", alone)
        self.assertIn("2 stages on 2 ranks: losses equal the whole model's", two)


if __name__ == "__main__":
    unittest.main()
