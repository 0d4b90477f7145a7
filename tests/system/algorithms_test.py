"""Collective algorithms through the command: chosen by name or by a table, refused early, and kept with a checkpoint because they order the sums."""

import json
import shutil
import unittest

import numpy

from support import SystemTest, metrics, run, safetensors

ROW = {"op": "all_reduce", "backend": "gloo", "bytes": 65536, "ranks": 3, "time_us": 10.0}


class Algorithms(SystemTest):
    def table(self, *algorithms, name="table.jsonl"):
        """A table in which the first algorithm is the fastest."""
        path = self.folder / name
        path.write_text("".join(json.dumps({**ROW, "algorithm": a, "time_us": 10.0 + i}) + "\n" for i, a in enumerate(algorithms)))
        return path

    def weights(self, tag, *sets, steps=6, nproc=3):
        dump = ("--dump-step", steps, "--dump-dir", self.folder / tag / "dump")
        done, log = self.train(tag, *dump, nproc=nproc, sets=["comm.backend=gloo", f"run.steps={steps}", *sets])
        return safetensors(log / "dump/weights.safetensors"), done

    def same(self, a, b):
        return all(numpy.array_equal(a[name], b[name]) for name in b)

    def forget_after(self, step):
        for folder in (self.folder / "ckpt").iterdir():
            if folder.is_dir() and int(folder.name.split("-")[-1]) > step:
                shutil.rmtree(folder)

    def test_algorithms_train_the_same_model(self):
        self.weights("engine")
        expected = metrics(self.folder / "engine")
        for algorithm in ("all_reduce=double_binary_tree,broadcast=ring", "two_level"):  # the others: tests/comm
            self.weights("named", f"comm.algorithm={algorithm}")
            self.assert_close_losses(metrics(self.folder / "named"), expected, 5e-6)

    def test_a_resumed_run_keeps_the_choice_unless_another_is_asked_for(self):
        saving = (f"checkpoint.dir={self.folder / 'ckpt'}", "checkpoint.every=3")
        ring, doubling = self.table("ring", "engine"), self.table("recursive_doubling", "engine", name="newer.jsonl")
        whole, _ = self.weights("whole", f"comm.table={ring}", *saving)

        def resumed(*sets):
            self.forget_after(3)
            return self.weights("part", *saving, "checkpoint.resume=latest", *sets)

        weights, done = resumed(f"comm.table={doubling}")
        self.assertTrue(self.same(weights, whole))
        self.assertIn("newer.jsonl: not used, since", done.stderr)
        self.assertTrue(self.same(resumed()[0], whole), "without any table")
        weights, done = resumed("comm.algorithm=recursive_doubling")
        self.assertIn("comm.algorithm = recursive_doubling instead of auto as in", done.stderr)
        self.assertFalse(self.same(weights, whole), "or this test could not fail")

    def refused(self, *sets, command="train"):
        flags = [x for s in sets for x in ("--set", s)]
        where = ("--world", 2) if command == "plan" else ("--nproc", 2)
        done = run(command, self.recipe, *where, *flags)
        self.assertNotIn("rank", done.stderr.lower().replace("ranks", ""), "a rank was started")
        return self.refusal(done)

    def test_bad_names_and_tables_are_refused_before_any_rank_starts(self):
        for command in ("train", "plan"):
            self.assertIn("comm.algorithm = rign: there is no such algorithm; did you mean ring?", self.refused("comm.algorithm=rign", command=command))
        self.assertIn("all_gather has no such algorithm", self.refused("comm.algorithm=all_gather=pairwise"))
        damaged = self.table("ring")
        damaged.write_text(damaged.read_text() + '{"op": "all_reduce"\n')
        self.assertIn(f"comm.table = {damaged}, line 2: ", self.refused(f"comm.table={damaged}"))
        self.assertIn("cannot be read", self.refused("comm.table=nowhere.jsonl"))


if __name__ == "__main__":
    unittest.main()
