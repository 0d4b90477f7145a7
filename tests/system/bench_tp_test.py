"""`tessera bench tp`: what it counts, prints, draws and refuses."""

import json
import math
import unittest
import xml.dom.minidom

from support import TESSERA, SystemTest, run

TINY = ("--iterations", 2, "--head-dim", 8, "--tokens", 8, "--hidden", "96,192,384")  # 8/3 of each is a multiple of 64: nothing is rounded


class BenchTp(SystemTest):
    def rows(self, *flags):
        done = run("bench", "tp", "--json", *TINY, *flags)
        self.assertEqual(done.returncode, 0, done.stderr)
        return [json.loads(line) for line in done.stdout.splitlines()]

    def test_computation_grows_with_the_square_of_the_hidden_size_and_traffic_with_it(self):
        for ranks, flags, streams in ((2, (), 8), (2, ("--sequence-parallel", "--overlap"), 10), (3, ("--sequence-parallel",), 10)):
            rows = self.rows("--nproc", ranks, *flags)
            self.assertEqual([row["hidden"] for row in rows], [96, 192, 384])
            for row in rows:
                self.assertEqual((row["ranks"], row["tokens"], row["heads"]), (ranks, 8, row["hidden"] // 8))
                self.assertGreater(min(row["compute_us"], row["communication_us"], row["layer_us"]), 0)
                self.assertAlmostEqual(row["communication_over_compute"], row["communication_us"] / row["compute_us"], places=9)
                self.assertAlmostEqual(row["law"], rows[0]["communication_over_compute"] * 96 / row["hidden"], places=9)
            for small, large in zip(rows, rows[1:]):
                self.assertAlmostEqual(math.log2(large["flops_per_token"] / small["flops_per_token"]), 2, delta=0.03)  # attention's own products grow with h
                self.assertEqual(large["bytes_per_token"], 2 * small["bytes_per_token"])
            if ranks == 2:  # three parts of 8 positions are not equal, and this is rank 0's count
                self.assertEqual(rows[0]["bytes_per_token"], streams * (ranks - 1) / ranks * 96 * 4)
                products = 6 * (4 * 96**2 + 3 * 96 * 256) / ranks
                self.assertGreaterEqual(rows[0]["flops_per_token"], products)
                self.assertLess(rows[0]["flops_per_token"], 1.05 * products)

    def test_bf16_sends_half_the_bytes(self):
        self.assertEqual([row["bytes_per_token"] for row in self.rows("--dtype", "bf16")], [768.0, 1536.0, 3072.0])

    def test_the_table_names_its_columns_and_the_picture_is_svg(self):
        picture = self.folder / "tp.svg"
        done = run("bench", "tp", *TINY, "--backend", "gloo", "--out", picture)
        self.assertEqual(done.returncode, 0, done.stderr)
        for column in ("hidden", "FLOPs/token", "bytes/token", "FLOPs/byte", "compute ms", "communication ms", "together ms", "communication/compute", "by law"):
            self.assertIn(column, done.stdout)
        self.assertRegex(done.stdout, r"counted: +FLOPs per token ~ h\^(1\.9\d|2\.00) \(law: 2\), bytes per token ~ h\^1\.00 \(law: 1\)")
        document = xml.dom.minidom.parse(str(picture))
        self.assertEqual(len(document.getElementsByTagName("polyline")), 4)
        self.assertIn("over 2 ranks (gloo)", picture.read_text())

    def test_one_size_has_no_slope(self):
        done = run("bench", "tp", "--iterations", 1, "--head-dim", 16, "--tokens", 1, "--hidden", 32, "--svg", self.folder / "one.svg")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertNotIn("~", done.stdout)

    def test_bad_input_is_refused_before_any_process_starts(self):
        for flags, words in (
            (("--hidden", "100"), ("--hidden = 100", "--head-dim = 64")),
            (("--hidden", "64"), ("--hidden = 64", "1 head ", "2 ranks", "--nproc")),
            (("--hidden", "128,256,128"), ("--hidden", "twice")),
            (("--hidden", "0"), ("--hidden = 0",)),
            (("--hidden", "65536"), ("--hidden = 65536", "32768")),
            (("--head-dim", "3"), ("--head-dim = 3", "even")),
            (("--tokens", "0"), ("--tokens = 0", "1 at least")),
            (("--tokens", "1", "--sequence-parallel"), ("--tokens = 1", "2 at least", "--sequence-parallel")),
            (("--nproc", "1"), ("--nproc = 1",)),
            (("--dtype", "fp16"), ("--dtype", "bf16")),
            (("--backend", "glo"), ("--backend", "gloo")),
            (("--seconds", "0"), ("--seconds",)),
            (("--iterations", "-1"), ("--iterations",)),
            (("--svg", "/nowhere/tp.svg"), ("--svg = /nowhere/tp.svg", "folder")),
        ):
            done = run("bench", "tp", *flags)
            last = self.refusal(done)
            for word in words:
                self.assertIn(word, last)
            self.assertNotIn("a layer over", done.stderr)

    def test_under_a_launcher_the_ranks_are_the_launchers(self):
        done = run("run", "--standalone", "--nproc-per-node=3", "--", TESSERA, "bench", "tp", "--json", *map(str, TINY))
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual({json.loads(line)["ranks"] for line in done.stdout.splitlines()}, {3})


if __name__ == "__main__":
    unittest.main()
