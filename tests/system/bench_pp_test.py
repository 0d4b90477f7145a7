"""`tessera bench pp`: what it counts, prints, draws and refuses."""

import json
import math
import unittest
import xml.dom.minidom

from support import SystemTest, run

TINY = ("--iterations", 2, "--dim", 64, "--layers", 2, "--tokens", 8, "--global-size", 8, "--schedule", "gpipe,zb_v", "--micro-batches", "2,8", "--hidden", "64,128")


class BenchPp(SystemTest):
    def test_rows_table_and_picture(self):
        picture = self.folder / "pp.svg"
        done = run("bench", "pp", "--json", *TINY, "--svg", picture)
        self.assertEqual(done.returncode, 0, done.stderr)
        rows = [json.loads(line) for line in done.stdout.splitlines()]
        self.assertEqual([row["kind"] for row in rows], ["overhead", "schedule", "schedule", "curve", "curve", "boundary", "boundary"])
        overhead, gpipe, zb_v, two, eight, *boundary = rows
        self.assertEqual((overhead["ranks"], overhead["micro_batches"]), (1, 8))
        self.assertGreater(min(overhead["step_us"], overhead["plain_us"]), 0)
        self.assertEqual([row["schedule"] for row in (gpipe, zb_v, two)], ["gpipe", "zb_v", "gpipe"])
        for row, formula in ((gpipe, 1 / 9), (zb_v, 1 / 49), (two, 1 / 3), (eight, 1 / 9)):
            self.assertAlmostEqual(row["formula"], formula, places=9)
            self.assertTrue(0 <= row["foretold"] < 1 and 0 <= row["bubble"] < 1)
        small, large = boundary
        self.assertEqual((small["bytes_per_token"], large["bytes_per_token"]), (2 * 64 * 4, 2 * 128 * 4))  # h elements of fp32, each way
        self.assertAlmostEqual(math.log2(large["flops_per_token"] / small["flops_per_token"]), 2, delta=0.25)  # the head and attention's products grow slower
        for row in boundary:
            self.assertAlmostEqual(row["message_over_compute"], 2 * row["message_us"] / row["compute_us"], places=9)
        self.assertEqual(len(xml.dom.minidom.parse(str(picture)).getElementsByTagName("polyline")), 3 + 1 + 4)
        done = run("bench", "pp", *TINY, "--backend", "gloo")
        self.assertEqual(done.returncode, 0, done.stderr)
        for words in ("plain loop", "step ms", "F = B = W", "zb_v, 2 chunks", "messages/compute", "bytes per token ~ h^1.00 (law: 1)", "(gloo)"):
            self.assertIn(words, done.stdout)

    def test_bad_input_is_refused_before_any_process_starts(self):
        for flags, words in (
            (("--dim", 100), ("--dim = 100", "multiple of 64")),
            (("--hidden", "64,0"), ("--hidden = 0",)),
            (("--global-size", 12), ("--global-size = 12", "multiple of 8")),
            (("--micro-batches", "3"), ("--micro-batches = 3", "--global-size = 32")),
            (("--schedule", "zb_vv"), ("--schedule = zb_vv", "did you mean zb_v")),
            (("--schedule", "pipedream"), ("pipedream",)),
            (("--layers", 1, "--schedule", "zb_v"), ("--layers = 1", "4 stages", "give 2")),
            (("--tokens", 0), ("--tokens = 0",)),
            (("--nproc", 1), ("--nproc = 1",)),
            (("--backend", "glo"), ("--backend", "gloo")),
            (("--svg", "/nowhere/pp.svg"), ("--svg = /nowhere/pp.svg",)),
        ):
            last = self.refusal(run("bench", "pp", *flags))
            for word in words:
                self.assertIn(word, last)


if __name__ == "__main__":
    unittest.main()
