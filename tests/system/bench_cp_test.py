"""`tessera bench cp`: what it counts, prints, draws and refuses."""

import json
import unittest
import xml.dom.minidom

from support import SystemTest, run

TINY = ("--iterations", 1, "--head-dim", 8, "--heads", 4, "--kv-heads", 2, "--length", "64,128")


class BenchCp(SystemTest):
    def test_each_method_beside_one_device_and_what_it_sends(self):
        picture = self.folder / "cp.svg"
        done = run("bench", "cp", "--json", *TINY, "--svg", picture)
        self.assertEqual(done.returncode, 0, done.stderr)
        rows = [json.loads(line) for line in done.stdout.splitlines()]
        timed = [row for row in rows if row["kind"] == "attention"]
        self.assertEqual([(row["length"], row["method"]) for row in timed[:4]], [(64, name) for name in ("ring", "ring_no_overlap", "all_gather", "ulysses")])
        self.assertEqual(len(timed), 8)
        for row in timed:
            self.assertAlmostEqual(row["rate_over_one"], row["one_us"] / (2 * row["time_us"]), places=9)
            u = row["length"] // 2 * 2 * 8 * 4  # bytes of one rank's keys
            if row["method"] != "ulysses":  # K and V forward; in backward again, and their gradients
                self.assertEqual(row["sent_bytes"], (2 + 2 + 2) * u)
        packed = [row for row in rows if row["kind"] == "packed"]
        self.assertEqual([(row["length"], row["documents"]) for row in packed], [(128, 4), (128, 32)])
        memory = {row["length"]: row for row in rows if row["kind"] == "memory"}
        self.assertAlmostEqual(memory[1024]["fused"], memory[65536]["fused"], delta=0.01)
        self.assertGreater(memory[16384]["unfused"], 0.9)
        xml.dom.minidom.parse(str(picture))
        text = run("bench", "cp", *TINY, "--method", "all_gather").stdout
        self.assertIn("rate over one device's", text)
        self.assertIn("all scores held", text)

    def test_refusals(self):
        for flags, words in (
            (("--method", "rings"), "did you mean ring"),
            (("--heads", 3, "--kv-heads", 2), "must be a multiple of --kv-heads = 2"),
            (("--nproc", 5, "--heads", 4, "--kv-heads", 4), "ulysses deals them to 5 ranks"),
            (("--length", 3), "--length = 3: 4 at least"),
        ):
            done = run("bench", "cp", "--iterations", 1, *flags)
            self.assertEqual(done.returncode, 2, flags)
            self.assertIn(words, done.stderr.splitlines()[-1])


if __name__ == "__main__":
    unittest.main()
