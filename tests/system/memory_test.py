"""What a run's memory is: in metrics, in the report, and when it runs out."""

import json
import os
import re
import resource
import shutil
import subprocess
import tempfile
import time
import unittest
import xml.etree.ElementTree as xml

from support import SystemTest, TESSERA, environment, metrics, run

CATEGORIES = ["params", "gradients", "optimizer", "activations", "outputs", "comm", "other"]


class MemoryTest(SystemTest):
    def planned_peak(self, *sets, world=1):
        flags = [x for s in ("run.threads=1", *sets) for x in ("--set", s)]
        plan = json.loads(run("plan", self.recipe, "--world", world, "--json", *flags).stdout)
        return max(ranks["peak_bytes"]["total"] for ranks in plan["ranks"])

    def out_of_memory(self, tag, limit, *arguments, nproc=1, sets=()):
        began = time.monotonic()
        done, _ = self.train(tag, *arguments, nproc=nproc, sets=(f"run.memory_limit_bytes={limit}", *sets), expect=1)
        self.assertLess(time.monotonic() - began, 60, "all ranks end soon")
        return done, done.stderr.strip().splitlines()[-1]

    def test_every_step_has_its_memory_by_category(self):
        for nproc in (1, 2):
            _, log = self.train(f"n{nproc}", nproc=nproc, sets=["run.steps=3"])
            for line in metrics(log):
                self.assertEqual(list(line["peak_by_category"]), CATEGORIES)
                self.assertEqual(sum(line["peak_by_category"].values()), line["peak_bytes"])
                self.assertEqual(list(line["current_by_category"]), CATEGORIES)
                self.assertLess(sum(line["current_by_category"].values()), line["peak_bytes"])
                self.assertEqual(line["current_by_category"]["params"], line["peak_by_category"]["params"])
                averages = 2 * line["current_by_category"]["params"]
                self.assertAlmostEqual(line["current_by_category"]["optimizer"] / averages, 1, delta=1e-3, msg="and a counter a parameter")

    def test_the_report_shows_the_peak_and_the_largest_tensors(self):
        offloaded = ["zero.stage=3", "offload.params=host", "offload.gradients=host", "offload.optimizer=host"]
        for nproc, sets in ((1, []), (2, offloaded)):
            tag = f"report{nproc}-{len(sets)}"
            done, log = self.train(tag, "--memory-report", nproc=nproc, sets=["run.steps=3", *sets])
            picture = (log / "memory_report.svg").read_text()
            texts = [element.text or "" for element in xml.fromstring(picture).iter("{http://www.w3.org/2000/svg}text")]
            self.assertTrue(any("memory of step 2, rank 0" in text for text in texts))
            [peak] = [text for text in texts if text.startswith("peak ")]
            self.assertIn(peak.split(" in ")[0], done.stdout)
            rows = re.findall(r"^ +\d[\d.]* [KM]?i?B +\[[\d, ]+\] \w+ +(\w+) +(\S.*)$", done.stdout, re.MULTILINE)
            self.assertGreaterEqual(len(rows), 8, done.stdout)
            self.assertTrue(any("layers." in name or ".weight" in name for _, name in rows), done.stdout)
            self.assertEqual([m["step"] for m in metrics(log)], [1, 2, 3])
            self.assertEqual("on the host" in done.stdout, sets == offloaded)
            self.assertEqual("on the host" in texts, sets == offloaded)
            for line in metrics(log):
                self.assertEqual(line["current_by_category"]["optimizer"] == 0, sets == offloaded)
                self.assertEqual(line["host_by_category"]["optimizer"] > 0, sets == offloaded)

    def test_the_report_goes_where_it_is_told_to(self):
        picture = self.folder / "mine.svg"
        _, log = self.train("told", f"--memory-report={picture}", sets=["run.steps=1", "optim.warmup_steps=0"])
        self.assertIn("memory of step 1", picture.read_text(), "the only step there is")
        self.assertFalse((log / "memory_report.svg").exists())
        done, _ = self.train("nowhere", f"--memory-report={self.folder}/missing/mine.svg", expect=2)
        self.assertIn("--memory-report = ", self.refusal(done))
        self.assertIn("there is no folder", self.refusal(done))

    def test_a_report_that_finds_no_room_costs_the_report_alone(self):
        self.train("before", sets=["run.steps=1", "optim.warmup_steps=0"])  # makes the packed text
        log, picture = self.folder / "full", self.folder / "mine.svg"

        def small_files():
            resource.setrlimit(resource.RLIMIT_FSIZE, (4000, 4000))
        done = subprocess.run([TESSERA, "train", self.recipe, f"--memory-report={picture}", "--set", f"log.dir={log}", "--set", "run.steps=3"], env=environment(),
                              timeout=120, capture_output=True, text=True, preexec_fn=small_files)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn(f"--memory-report: picture {picture}: cannot be written: File too large (ulimit -f); make room there, or name a file on another disk; training goes on "
                      "without it", done.stderr)
        self.assertNotIn("picture: ", done.stdout)
        self.assertIn("the largest tensors alive at the peak", done.stdout, "the text is there")
        self.assertEqual(len(metrics(log)), 3)

    def test_watching_changes_no_number(self):
        _, plain = self.train("plain", sets=["run.steps=3"])
        _, watched = self.train("watched", "--memory-report", sets=["run.steps=3"])
        for field in ("loss", "grad_norm", "peak_bytes", "peak_by_category", "current_by_category"):
            self.assertEqual([m[field] for m in metrics(plain)], [m[field] for m in metrics(watched)], field)

    def test_out_of_memory_says_what_would_fit_and_it_fits(self):
        for nproc, share in ((1, 1), (2, 0.8)):
            peak = self.planned_peak(world=nproc)
            limit = int(share * peak) - 1
            done, sentence = self.out_of_memory(f"small{nproc}-{limit}", limit, nproc=nproc)
            self.assertIn("is out of memory", sentence)
            self.assertIn(f"run.memory_limit_bytes = {limit}", sentence)
            self.assertIn("the cheapest setting that would fit: --set ", sentence)
            for part in ("is out of memory", "the cheapest setting that would fit", "predicted peak", "the largest tensors alive then", "(w, g, k) = (4, 4, 8)", "as it is"):
                self.assertEqual(done.stderr.count(part), 1, f"{part} once, not once a rank:\n{done.stderr}")
            sets = re.findall(r"--set (\S+)", sentence.split("would fit: ")[1])
            _, log = self.train(f"fits{nproc}-{limit}", nproc=nproc, sets=[f"run.memory_limit_bytes={limit}", "run.steps=3", *sets])
            self.assertLessEqual(max(m["peak_bytes"] for m in metrics(log)), limit)

    def test_where_nothing_fits_it_says_so(self):
        for limit in (20000, 1000):  # the latter is less than the first look at what the device can multiply
            done, sentence = self.out_of_memory("hopeless", limit)
            self.assertEqual(done.stderr.count("is out of memory"), 1, f"said once:\n{done.stderr}")
            self.assertIn("before the first step", sentence)
            self.assertIn(f"run.memory_limit_bytes = {limit}", sentence)
            self.assertRegex(sentence, r"none of \d+ settings tried would fit: the smallest peak, .*, is that of --set")

    def test_what_was_saved_is_kept(self):
        saving = [f"checkpoint.dir={self.folder}/ckpt", "checkpoint.every=2", "checkpoint.async=true"]
        self.train("first", nproc=2, sets=["run.steps=4", *saving])
        _, sentence = self.out_of_memory("second", self.planned_peak(world=2) - 1, nproc=2, sets=["checkpoint.resume=latest", *saving])
        self.assertIn("is out of memory", sentence)
        self.assertTrue((self.folder / "ckpt/step-00000004/manifest.json").exists())
        _, log = self.train("third", nproc=2, sets=["run.steps=6", "checkpoint.resume=latest", *saving])
        self.assertEqual([m["step"] for m in metrics(log)], [5, 6])

    def test_plan_says_whether_it_fits(self):
        peak = self.planned_peak()
        flags = ["--set", "run.threads=1", "--set"]
        self.assertTrue(json.loads(run("plan", self.recipe, "--json", *flags, f"run.memory_limit_bytes={peak}").stdout)["fits"])
        told = run("plan", self.recipe, *flags, f"run.memory_limit_bytes={peak - 1}").stdout
        self.assertIn("does not fit run.memory_limit_bytes", told)
        self.assertIn("the cheapest setting that would fit: --set ", told)

    def test_a_model_beyond_the_systems_limit_trains_with_its_state_on_disk(self):
        """101 M parameters keep 16 bytes each, and the process may have 1,500 MB; 8 of them, and a piece of state, fit. Of 800 MB units in use do."""
        limit = 1500 * 10**6
        beside = "/dev/shm" if os.path.isdir("/dev/shm") and shutil.disk_usage("/dev/shm").free > 2 << 30 else str(self.folder)  # no slow disk is waited for

        def bounded_run(tag, *sets, limit=limit):
            def bounded():
                resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))

            sets = ("model.dim=1024", "model.layers=6", "model.kv_heads=4", "model.ffn_dim=4096", "data.seq_len=16", "batch.global_size=1", "batch.micro_size=1",
                    "run.steps=2", "optim.warmup_steps=0", f"log.dir={self.folder / tag}", *sets)
            return subprocess.run([TESSERA, "train", self.recipe, *(word for one in sets for word in ("--set", one))], env=environment(), timeout=300,
                                  capture_output=True, text=True, preexec_fn=bounded)
        told = self.refusal(bounded_run("refused"))
        self.assertRegex(told, r"keeps 16\.0 bytes on a rank from step to step \(weight, gradient, optimizer\), which is 1\.\d+ GiB, and a process may have 1\.40 GiB "
                               r"\(ulimit -d or -v\); raise that limit, set offload\.optimizer = disk")
        with tempfile.TemporaryDirectory(prefix="test-of-tessera-", dir=beside) as away:
            done = bounded_run("trained", "offload.optimizer=disk", "offload.update=device", f"offload.dir={away}")
            slices = bounded_run("slices", "zero.stage=3", "offload.params=disk", "offload.gradients=disk", "offload.optimizer=disk", f"offload.dir={away}",
                                 limit=800 * 10**6)
        self.assertEqual(done.returncode, 0, done.stderr[-3000:])
        self.assertEqual(slices.returncode, 0, slices.stderr[-3000:])
        self.assertRegex(slices.stderr, r"offload\.params = disk: 1\.\d+ GiB of .* free in .*; a step writes \d\.\d+ GiB there and reads \d\.\d+ GiB, [\d.]+ \w.* at the ")
        losses = [[m["loss"] for m in metrics(self.folder / tag)] for tag in ("trained", "slices")]
        self.assertEqual(len(losses[0]), 2)
        self.assertEqual(losses[0], losses[1])

    def test_a_limit_below_zero_is_refused(self):
        done, _ = self.train("negative", sets=["run.memory_limit_bytes=-1"], expect=2)
        self.assertIn("run.memory_limit_bytes = -1", self.refusal(done))


if __name__ == "__main__":
    unittest.main()
