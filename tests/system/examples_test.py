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


class Examples(SystemTest):
    def command(self, *arguments):
        done = subprocess.run(list(map(str, arguments)), capture_output=True, text=True, timeout=200, env=environment(OMP_NUM_THREADS="1"))
        self.assertEqual(done.returncode, 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}")
        return done.stdout

    def test_toy_ddp_alone(self):
        self.assertRegex(self.command(TOY), r"loss")

    def torchrun(self, *arguments):
        return self.command(sys.executable, "-m", "torch.distributed.run", "--standalone", "--no-python", "--nproc-per-node", 2, *arguments)

    def test_train_under_torchrun_equals_nproc(self):
        _, ours = self.train("nproc", nproc=2)
        self.torchrun(TESSERA, "train", self.recipe, "--set", f"log.dir={self.folder / 'torchrun'}")
        losses = [[line["loss"] for line in metrics(log)] for log in (ours, self.folder / "torchrun")]
        self.assertEqual(losses[0], losses[1])

    def test_toy_ddp_under_torchrun(self):
        out = self.torchrun(TOY)
        self.assertRegex(out, r"loss")
        self.assertTrue(re.search(r"2 replicas, checksum [0-9a-f]+: equal", out), out)


if __name__ == "__main__":
    unittest.main()
