"""What a machine with a GPU is given (tests/cuda/run), as far as one without can run it, from the folder that is carried there."""

import json
import os
import pathlib
import subprocess
import sys
import unittest

from support import SOURCE, SystemTest

BUILD = pathlib.Path(os.environ.get("TESSERA_BUILD", SOURCE / "build/release"))


class CudaRun(SystemTest):
    def call(self, *words, root=SOURCE, expect=0, **variables):
        done = subprocess.run([sys.executable, root / "tests/cuda/run", *words], capture_output=True, text=True, timeout=600, env=os.environ | variables)
        self.assertEqual(done.returncode, expect, done.stdout + done.stderr)
        return done

    def test_parts_are_listed_and_fit_ten_minutes_but_for_several_devices(self):
        lines = self.call("--list").stdout.splitlines()
        limits = {line.split()[0]: float(line.split()[1]) for line in lines}
        self.assertEqual(list(limits), ["device", "kernels", "memory", "losses", "shared", "nccl", "graph", "speed", "sanitizer"])
        self.assertLessEqual(sum(limits.values()) - limits["nccl"], 600)
        self.assertIn("there is no part nothing", self.call("--list", "--only", "nothing", expect=2).stderr)

    def test_what_is_carried_runs_dry(self):
        carried, results = self.folder / "carried", self.folder / "results.json"
        self.call("--pack", carried, "--build", BUILD)
        done = self.call("--dry", "--build", carried / "build/cuda", "--json", results, "--python", sys.executable, root=carried)
        rows = {row["part"]: row for row in json.loads(results.read_text())["parts"]}
        self.assertEqual({name for name, row in rows.items() if row["outcome"] != "passed"}, {"nccl", "sanitizer"}, done.stdout)
        self.assertTrue(all(rows[name]["outcome"] == "skipped" and rows[name]["why"] for name in ("nccl", "sanitizer")))
        self.assertEqual([line.split()[0] for line in done.stdout.splitlines()[:-1]], list(rows))
        self.assertGreater(rows["kernels"]["results"]["tests"], 5)
        self.assertEqual(rows["memory"]["results"]["tests"], 1)
        self.assertEqual(rows["losses"]["results"]["llama"], {"losses": 0, "gradients": 0, "peak": 1})
        speed = rows["speed"]["results"]
        self.assertGreater(min(speed["tessera"]["tokens_per_s"], speed["eager"]["tokens_per_s"], speed["bound"]["products_s"]), 0)

    def test_a_part_that_is_late_ends_and_the_others_go_on(self):
        done = self.call("--dry", "--build", BUILD, "--only", "kernels,graph", "--limit", "0.1", "--json", self.folder / "late.json", expect=1)
        self.assertRegex(done.stdout, r"kernels +late +[\d.]+ s  not done after")
        self.assertRegex(done.stdout, r"graph +late ")

    def test_a_device_that_is_not_there_is_refused(self):
        words = [BUILD / "bin/tessera_memory_test", "--gtest_filter=DeviceAllocator.*"]
        done = subprocess.run(words, capture_output=True, text=True, env=os.environ | {"TESSERA_TEST_DEVICE": "cuda"})
        self.assertEqual(done.returncode, 2)
        self.assertIn("TESSERA_TEST_DEVICE = cuda: there is no CUDA device here, or none in this build", done.stderr)


if __name__ == "__main__":
    unittest.main()
