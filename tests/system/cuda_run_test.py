"""What a machine with a GPU is given (tests/cuda/run), as far as one without can run it, from the folder that is carried there."""

import json
import os
import pathlib
import runpy
import shutil
import subprocess
import sys
import time
import types
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
        self.assertRegex((carried / "build/cuda/torch_version").read_text(), r"^\d+\.\d+\.\d+\S*\n$")
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

    def test_a_peer_that_is_late_has_had_its_share_and_the_others_are_measured(self):
        started, test = {}, self

        class Machine:
            dry, device, model, folder, options = True, "cpu", "", test.folder, types.SimpleNamespace(python="python")
            until = time.monotonic() + 100

            def train(self, *words, **settings):
                return [{"step_s": 1, "tflops_per_device": 1, "tokens": 8, "peak_bytes": 1}] * 6, {}

            def call(self, command, **variables):
                started[command[-1]] = self.until - time.monotonic()
                if command[-1] == "eager":
                    raise subprocess.TimeoutExpired(command, started["eager"])
                return '{"products_s": 0.5}\n'

        found = runpy.run_path(str(SOURCE / "tests/cuda/run"))["speed"](Machine())
        self.assertEqual(found["eager"], {"late": "not done after 50 s"})
        self.assertEqual(found["tessera"]["share_of_bound"], 0.5)
        self.assertAlmostEqual(started["eager"], 50, delta=5)
        self.assertAlmostEqual(started["bound"], 100, delta=5)

    def carried_to(self, version="2.13.0+cu130"):
        """A packed folder whose tessera says where it looks for libraries, and an environment with a torch of CUDA's that has nothing but its places."""
        root, site = self.folder / "carried", self.folder / "env/lib/python3.0/site-packages"
        for name in ("torch/lib", "nvidia/cu13/lib", "nvidia/nccl/lib"):
            (site / name).mkdir(parents=True, exist_ok=True)
        (site / "torch/__init__.py").write_text("")
        (site / "torch/version.py").write_text(f"__version__ = '{version}'\n")
        shutil.copytree(SOURCE / "tests/cuda", root / "tests/cuda", dirs_exist_ok=True)
        (root / "build/cuda/bin").mkdir(parents=True, exist_ok=True)
        (root / "build/cuda/torch_version").write_text("2.13.0+cu130\n")
        for name in ("tessera", "tessera_kernels_test", "tessera_memory_test"):
            binary = root / "build/cuda/bin" / name
            binary.write_text('#!/bin/sh\nprintf \'{"torch": "", "devices": [{"name": "cuda:0", "model": "%s"}]}\' "$LD_LIBRARY_PATH"\n')
            binary.chmod(0o755)
        return root, site

    def searched(self, root, *words, **variables):
        results = self.folder / "results.json"
        self.call("--only", "device", "--json", results, *words, root=root, **variables)
        return json.loads(results.read_text())["model"].split(":")

    def test_libraries_are_looked_for_in_torchs_wheel_and_in_those_of_cuda(self):
        root, site = self.carried_to()
        places = [str(root / "build/cuda/lib"), *(str(site / name) for name in ("torch/lib", "nvidia/cu13/lib", "nvidia/nccl/lib"))]
        self.assertEqual(self.searched(root, "--python", sys.executable, PYTHONPATH=str(site))[:4], places)
        (root / "build/cuda_torch_dir").write_text(f"{site / 'torch'}\n")  # without --python, where the CUDA torch is known
        self.assertEqual(self.searched(root, PYTHONPATH="")[:4], places)

    def test_another_torch_than_that_of_the_build_is_refused(self):
        root, site = self.carried_to("2.13.0+cpu")
        refusal = self.call("--python", sys.executable, root=root, expect=2, PYTHONPATH=str(site)).stderr
        self.assertRegex(refusal, r"^tests/cuda/run: \S+ has torch 2\.13\.0\+cpu, and \S+/build/cuda was made with 2\.13\.0\+cu130: .*--python\n$")
        (site / "torch/version.py").unlink()
        self.assertIn("has no torch, and ", self.call("--python", sys.executable, root=root, expect=2, PYTHONPATH=str(site)).stderr)

    def test_a_device_that_is_not_there_is_refused(self):
        words = [BUILD / "bin/tessera_memory_test", "--gtest_filter=DeviceAllocator.*"]
        done = subprocess.run(words, capture_output=True, text=True, env=os.environ | {"TESSERA_TEST_DEVICE": "cuda"})
        self.assertEqual(done.returncode, 2)
        self.assertIn("TESSERA_TEST_DEVICE = cuda: there is no CUDA device here, or none in this build", done.stderr)


if __name__ == "__main__":
    unittest.main()
