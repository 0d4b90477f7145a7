"""Saving while training goes on, disks that fill up, weights that hashes cannot tell from others, partial loads."""

import json
import os
import shutil
import struct
import subprocess
import time
import unittest

from support import TESSERA, SystemTest, environment, metrics, run


class Checkpoint(SystemTest):
    @property
    def dir(self):
        return self.folder / "ckpt"

    def sets(self, *more):
        return [f"checkpoint.dir={self.dir}", "checkpoint.every=4", "run.steps=8", "optim.schedule=constant", *more]

    def copy_of_a_saved_run(self):
        """Of two ranks, with checkpoints of steps 4 and 8."""
        shutil.copytree(self.once("first", lambda at: self.train("first", nproc=2, sets=self.sets(f"checkpoint.dir={at}"))), self.dir)

    def files(self, step):
        return {path.name: path.read_bytes() for path in (self.dir / f"step-{step:08}").glob("*.safetensors")}

    def test_saving_in_the_background_changes_nothing(self):
        written = {}
        for mode in ("false", "true"):
            _, log = self.train(mode, nproc=2, sets=self.sets(f"checkpoint.async={mode}", "checkpoint.staging_bytes=65536"))
            written[mode] = ([(line["loss"], line["grad_norm"]) for line in metrics(log)], self.files(4), self.files(8))
            self.assertEqual([line["step"] for line in metrics(log) if "save_blocked_s" in line], [5])
            shutil.rmtree(self.dir)
        self.assertEqual(written["true"], written["false"])

    def test_a_resumed_run_replays_the_recorded_step(self):
        self.copy_of_a_saved_run()
        for world in (1, 3):
            done, _ = self.train(f"again{world}", nproc=world, sets=[f"checkpoint.resume={self.dir / 'step-00000004'}", "run.steps=5", "optim.schedule=constant"])
            self.assertIn("replays bit for bit", done.stderr)

    def test_a_flipped_weight_is_found_by_its_hash_unless_told_not_to_look(self):
        self.train("first", sets=self.sets())
        folder = self.dir / "step-00000004"
        weights = next(folder.glob("*.safetensors"))
        data = bytearray(weights.read_bytes())
        (size,) = struct.unpack("<Q", data[:8])
        begin, _ = json.loads(data[8 : 8 + size])["model.head.weight"]["data_offsets"]
        data[8 + size + begin + 2] ^= 0x40
        weights.write_bytes(data)
        resume = [f"checkpoint.resume={folder}", "optim.schedule=constant"]
        self.assertIn("model.head.weight", self.refusal(self.train("hash", sets=resume, expect=2)[0]))
        done, _ = self.train("off", sets=[*resume, "checkpoint.verify=false", "run.steps=5"])
        self.assertNotIn("replay", done.stderr)

    def test_under_another_launcher_a_damaged_one_gives_way_to_the_older(self):
        self.copy_of_a_saved_run()
        weights = self.dir / "step-00000008" / "rank-00001-of-00002.safetensors"
        data = bytearray(weights.read_bytes())
        data[-50] ^= 1
        weights.write_bytes(data)
        log = self.folder / "launched"
        flags = [x for s in self.sets(f"log.dir={log}", "checkpoint.resume=latest") for x in ("--set", s)]
        done = run("run", "--standalone", "--nproc-per-node", 2, "--", TESSERA, "train", self.recipe, *flags)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual([line["step"] for line in metrics(log)], [5, 6, 7, 8])
        self.assertEqual(done.stderr.count("passing over"), 1, "said once")
        for word in ("step-00000008", weights.name, "at offset", "replays bit for bit"):
            self.assertIn(word, done.stderr)

    def test_a_parameter_may_be_left_out_by_name_only(self):
        self.copy_of_a_saved_run()
        resume = [f"checkpoint.resume={self.dir / 'step-00000004'}", "optim.schedule=constant", "run.steps=5", "model.ffn_dim=64"]
        self.assertIn("model.ffn_dim", self.refusal(self.train("strict", sets=resume, expect=2)[0]))
        done, log = self.train("partial", nproc=2, sets=[*resume, 'checkpoint.partial=["layers.*.feed_forward.**"]'])
        self.assertEqual([line["step"] for line in metrics(log)], [5])
        self.assertIn("checkpoint.partial", done.stderr)
        self.assertIn("matches no tensor", self.refusal(self.train("typo", sets=[*resume, 'checkpoint.partial=["layers.*.feed_forward.**", "nothing"]'], expect=2)[0]))

    def test_a_used_folder_and_a_live_run_are_refused_by_name(self):
        self.copy_of_a_saved_run()
        for nproc in (1, 2):
            refusal = self.refusal(self.train(f"second{nproc}", nproc=nproc, sets=self.sets(), expect=2)[0])
            for word in (str(self.dir), "step-00000004 to step-00000008", "checkpoint.resume = latest", "checkpoint.replace = true"):
                self.assertIn(word, refusal)
            self.assertFalse((self.folder / f"second{nproc}").exists(), "something was started")
        done, log = self.train("third", nproc=2, sets=self.sets("checkpoint.replace=true", "checkpoint.keep=1"))
        self.assertIn("set-aside-1", done.stderr)
        self.assertEqual(len(metrics(log)), 8)
        self.assertEqual(sorted(path.name for path in self.dir.iterdir()), ["set-aside-1", "step-00000008"])
        self.assertEqual(sorted(path.name for path in (self.dir / "set-aside-1").iterdir()), ["step-00000004", "step-00000008"])

        sets = self.sets("checkpoint.resume=latest", "checkpoint.every=0", "run.steps=100000", f"log.dir={self.folder / 'long'}")
        flags = [x for s in sets for x in ("--set", s)]
        live = subprocess.Popen([TESSERA, "train", self.recipe, *flags], stderr=subprocess.DEVNULL, env=environment())
        try:
            while not (self.folder / "long/metrics.jsonl").exists():
                time.sleep(0.05)
            for nproc, launcher, more in ((1, (), []), (2, (), ["checkpoint.resume=latest"]), (2, ("run", "--nproc-per-node", 2, "--", TESSERA), [])):
                sets = self.sets("run.steps=100000", f"log.dir={self.folder / 'rival'}", *more)
                flags = [x for s in sets for x in ("--set", s)]
                refusal = self.refusal(run(*launcher, "train", self.recipe, *(() if launcher else ("--nproc", nproc)), *flags))
                self.assertIn(f"process {live.pid} on ", refusal)
                self.assertIn("wait for its end, end it (on SIGTERM it saves), or name another checkpoint.dir", refusal)
                self.assertNotIn("checkpoint.resume", refusal)
        finally:
            live.kill()
            live.wait()
        done, _ = self.train("after", nproc=2, sets=self.sets("checkpoint.resume=latest", "run.steps=9"))
        self.assertFalse((self.dir / ".lock").exists(), "the killed run's lock is taken over, and goes")

    def test_a_restart_goes_on_from_the_newest_of_its_job(self):
        self.copy_of_a_saved_run()
        log = self.folder / "launched"
        named = f"checkpoint.resume={self.dir / 'step-00000004'}"
        flags = [x for s in self.sets(named, f"log.dir={log}", "checkpoint.every=1", "run.steps=10") for x in ("--set", s)]
        done = run("run", "--standalone", "--nproc-per-node", 2, "--max-restarts", 1, "--inject", "rank=1,op=all_reduce,count=4,do=kill", "--",
                   TESSERA, "train", self.recipe, *flags)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("restart 1 of 1", done.stderr)
        starts = [int(line.split("steps ")[1].split(" to ")[0]) for line in done.stderr.splitlines() if "parameters" in line]
        self.assertEqual(starts[0], 5)
        self.assertGreater(starts[1], 6, done.stderr)
        self.assertEqual([line["step"] for line in metrics(log)], list(range(5, 11)))
        self.assertTrue((self.dir / "set-aside-1" / "step-00000008").exists(), "the first attempt went back behind it")
        self.assertFalse((self.dir / "set-aside-2").exists(), "the second went on")

    def test_a_restart_goes_on_from_no_other_jobs(self):
        self.copy_of_a_saved_run()
        log = self.folder / "launched"
        flags = [x for s in self.sets("checkpoint.replace=true", f"log.dir={log}", "optim.lr=5e-4") for x in ("--set", s)]
        # Its first attempt ends while ranks meet, before it has set anything aside.
        done = run("run", "--standalone", "--nproc-per-node", 2, "--max-restarts", 1, "--inject", "rank=1,op=any,count=2,do=kill", "--",
                   TESSERA, "train", self.recipe, *flags)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("restart 1 of 1", done.stderr)
        self.assertIn("passing over step-00000004 to step-00000008", done.stderr)
        self.assertEqual([line["step"] for line in metrics(log)], list(range(1, 9)), "as the first attempt would have begun")
        for step in (4, 8):
            self.assertTrue((self.dir / "set-aside-1" / f"step-{step:08}").exists())
            self.assertTrue((self.dir / f"step-{step:08}").exists())
        self.assertFalse((self.dir / "set-aside-2").exists())

    @unittest.skipUnless(os.geteuid() == 0, "only root can mount")
    def test_records_that_a_full_disk_loses_are_told(self):
        for tag, flags, code in (("told", (), 0), ("strict", ("--strict-log",), 1)):
            log = self.folder / tag
            log.mkdir()
            if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=28k", "tmpfs", log], capture_output=True).returncode:
                self.skipTest("no tmpfs here")
            try:
                done, _ = self.train(tag, *flags, sets=["log.record=false"], expect=code)
                kept = metrics(log)
                self.assertLess(len(kept), 20)
                self.assertEqual([line["step"] for line in kept], list(range(1, len(kept) + 1)), "what is there is whole")
                if code:
                    self.assertIn("--strict-log", done.stderr.strip().splitlines()[-1])
                else:
                    self.assertIn("a record could not be written: No space left on device; training goes on", done.stderr)
                    self.assertIn("records were lost", done.stderr)
                    self.assertIn("finished at step 20", done.stderr)
            finally:
                subprocess.run(["umount", "-l", log], check=True)

    @unittest.skipUnless(os.geteuid() == 0, "only root can mount")
    def test_a_disk_that_is_full_from_the_start_loses_records_alone(self):
        for tag, flags, code in (("told", (), 0), ("strict", ("--strict-log",), 1)):
            log = self.folder / tag
            log.mkdir()
            if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8k", "tmpfs", log], capture_output=True).returncode:
                self.skipTest("no tmpfs here")
            try:
                (log / "else").write_bytes(bytes(8 << 10))
                done, _ = self.train(tag, *flags, sets=["log.record=false"], expect=code)
                self.assertIn("config.toml cannot be written: No space left on device", done.stderr)
                self.assertEqual("finished at step 20" in done.stderr, code == 0)
                self.assertEqual([file.name for file in log.glob("*.new")], [])
            finally:
                subprocess.run(["umount", "-l", log], check=True)

    @unittest.skipUnless(os.geteuid() == 0, "only root can mount")
    def test_a_run_goes_on_over_a_log_disk_that_is_full(self):
        log = self.folder / "goes_on"
        log.mkdir()
        # Few files, so that in the end there is no room for another one either, such as TensorBoard's.
        if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=200k,nr_inodes=20", "tmpfs", log], capture_output=True).returncode:
            self.skipTest("no tmpfs here")
        try:
            (log / "filler").touch()

            def fill():
                with open(log / "filler", "ab") as filler:
                    filler.write(bytes(os.statvfs(log).f_bavail * os.statvfs(log).f_frsize))
                for n in range(os.statvfs(log).f_favail):
                    (log / f"none-{len(list(log.iterdir()))}-{n}").touch()

            first = self.sets("log.record=false", "checkpoint.resume=latest", "run.steps=4")
            self.train("goes_on", sets=first)
            fill()
            config, kept = (log / "config.toml").read_text(), (log / "metrics.jsonl").read_bytes()
            done, _ = self.train("goes_on", sets=first)
            self.assertNotIn("config.toml", done.stderr, "as a restart, it has nothing else to write")
            fill()
            on = self.sets("log.record=false", "checkpoint.resume=latest", "optim.lr=5e-4")
            done, _ = self.train("goes_on", sets=[*on, "run.steps=8"])
            self.assertIn("config.toml cannot be written: No space left on device; the run goes on without it, and the config.toml that is there tells another", done.stderr)
            self.assertIn("records are lost until there is room", done.stderr, "TensorBoard's file")
            self.assertIn("finished at step 8", done.stderr)
            self.assertEqual((log / "config.toml").read_text(), config)
            self.assertEqual((log / "metrics.jsonl").read_bytes()[:len(kept)], kept)
            self.assertEqual(sorted(path.name for path in log.glob("*.partial")), [])
            done, _ = self.train("goes_on", "--strict-log", sets=[*on, "run.steps=12"], expect=1)
            self.assertIn("config.toml cannot be written: No space left on device; make room there, or leave out --strict-log", done.stderr.strip().splitlines()[-1])
        finally:
            subprocess.run(["umount", "-l", log], check=True)

    @unittest.skipUnless(os.geteuid() == 0, "only root can mount")
    def test_a_disk_that_is_full_or_read_only(self):
        self.dir.mkdir()
        if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", self.dir], capture_output=True).returncode:
            self.skipTest("no tmpfs here")
        try:
            self.train("good", nproc=2, sets=self.sets("run.steps=4"))
            free = os.statvfs(self.dir).f_bavail * os.statvfs(self.dir).f_frsize
            (self.dir / "filler").write_bytes(b"\0" * (free - 200000))
            for mode in ("false", "true"):
                resume = ["checkpoint.resume=latest", f"checkpoint.async={mode}"]
                done, log = self.train(f"full-{mode}", nproc=2, sets=self.sets(*resume, "run.steps=12"), expect=1)
                self.assertIn("step 8 was not saved", done.stderr)
                self.assertEqual([line["step"] for line in metrics(log)], list(range(5, 13)), "training went on")
                self.assertIn("No space left", done.stderr.strip().splitlines()[-1])
            (self.dir / "filler").unlink()
            subprocess.run(["mount", "-o", "remount,ro", self.dir], check=True)
            done, _ = self.train("read-only", nproc=2, sets=self.sets("checkpoint.resume=latest"), expect=2)
            self.assertIn("Read-only", done.stderr.strip().splitlines()[-1], "seen before anything is trained")
            subprocess.run(["mount", "-o", "remount,rw", self.dir], check=True)
            self.assertEqual([path.name for path in self.dir.iterdir()], ["step-00000004"])
            self.assertTrue(json.loads(run("inspect", self.dir, "--json").stdout)["valid"])
        finally:
            subprocess.run(["umount", "-l", self.dir], check=True)


if __name__ == "__main__":
    unittest.main()
