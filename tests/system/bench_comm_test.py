"""`tessera bench comm`: what it prints, writes and refuses."""

import json
import shutil
import unittest
import xml.dom.minidom

from support import TESSERA, SystemTest, run

FAST = ("--iterations", 5)


class BenchComm(SystemTest):
    def rows(self, *flags, **extra):
        done = run("bench", "comm", "--json", *FAST, *flags, **extra)
        self.assertEqual(done.returncode, 0, done.stderr)
        return [json.loads(line) for line in done.stdout.splitlines()]

    def test_rows_of_every_backend_size_and_operation(self):
        picture = self.folder / "bench.svg"
        rows = self.rows("--op", "all_reduce,all_gather", "--backend", "gloo,shm", "--bytes", "4096,64K", "--nproc", 3, "--svg", picture)
        found = [(row["op"], row["bytes"], row["backend"], row["algorithm"], row["ranks"]) for row in rows]
        expected = [(op, size, backend, "engine", 3) for op in ("all_reduce", "all_gather") for size in (4096, 65536) for backend in ("gloo", "shm")]
        self.assertEqual(found, expected)
        for row in rows:
            self.assertGreater(row["time_us"], 0)
            self.assertGreater(row["link_gb_s"], 0)
            factor = 4 / 3 if row["op"] == "all_reduce" else 2 / 3
            self.assertAlmostEqual(row["algorithm_gb_s"], row["whole_bytes"] / row["time_us"] / 1e3, places=9)
            self.assertAlmostEqual(row["bus_gb_s"] / row["algorithm_gb_s"], factor, places=9)
            self.assertAlmostEqual(row["link_share"], row["bus_gb_s"] / row["link_gb_s"], places=9)
        document = xml.dom.minidom.parse(str(picture))
        self.assertEqual(len(document.getElementsByTagName("polyline")), 8)

    def test_every_operation_is_right_from_shared_buffers_in_bf16_by_the_hundred(self):
        sizes = ",".join(str(4 * n) for n in range(1, 41))
        rows = self.rows("--op", "all", "--bytes", sizes, "--backend", "shm", "--dtype", "bf16", "--buffer", "shared")
        self.assertEqual(len(rows), 400)
        self.assertEqual({(row["dtype"], row["buffers"]) for row in rows}, {("bf16", "shared")})

    def test_the_table_it_writes_chooses_for_comm_table(self):
        table = self.folder / "table.jsonl"
        rows = self.rows("--algorithm", "engine,ring,binomial_tree", "--bytes", "4K", "--backend", "gloo", "--table", table)
        self.assertEqual({row["algorithm"] for row in rows}, {"engine", "ring", "binomial_tree"})
        self.train("with_table", nproc=2, sets=(f"comm.table={table}", "comm.backend=gloo", "run.steps=4"))
        table.write_text(table.read_text().replace('"ring"', '"rink"'))
        done, _ = self.train("with_bad_table", nproc=2, sets=(f"comm.table={table}",), expect=2)
        self.assertIn("ring", self.refusal(done))

    def test_a_wrong_result_is_an_error(self):
        done = run("bench", "comm", *FAST, "--op", "broadcast", "--bytes", "64K", TESSERA_INJECT="rank=1,op=broadcast,count=1,do=corrupt")
        self.assertEqual(done.returncode, 1, done.stderr)
        self.assertIn("wrong", done.stderr.strip().splitlines()[-1])

    def test_what_a_rank_refuses_is_refused(self):
        self.assertIn("comm.interface = nope", self.refusal(run("bench", "comm", *FAST, "--bytes", "4K", "--interface", "nope")))

    def test_files_in_place_of_a_device_are_refused(self):
        for flag in ("--svg", "--table"):
            self.assertIn(f"{flag} = /dev/full: is a device", self.refusal(run("bench", "comm", *FAST, "--bytes", "4K", flag, "/dev/full")))

    def test_mpi_ranks_are_started_by_mpirun(self):
        rows = self.rows("--backend", "mpi", "--bytes", "4K,1M")
        self.assertEqual([(row["backend"], row["bytes"], row["ranks"]) for row in rows], [("mpi", 4096, 2), ("mpi", 1048576, 2)])

    def test_without_mpirun_mpi_is_refused(self):
        self.assertIn("mpirun", self.refusal(run("bench", "comm", "--backend", "mpi", PATH="/nonexistent")))

    def test_bad_input_is_refused_before_any_process_starts(self):
        for flags, words in (
            (("--op", "all_redice"), ("--op", "all_redice", "all_reduce")),
            (("--backend", "glo"), ("--backend", "gloo")),
            (("--algorithm", "rink"), ("--algorithm", "ring")),
            (("--op", "all_to_all", "--algorithm", "ring"), ("--algorithm", "pairwise")),
            (("--bytes", "4097"), ("--bytes = 4097", "multiple")),
            (("--bytes", "4X"), ("--bytes = 4X", "4K")),
            (("--bytes", "0"), ("--bytes = 0",)),
            (("--nproc", "1"), ("--nproc = 1",)),
            (("--dtype", "fp31"), ("--dtype", "fp32")),
            (("--buffer", "mine"), ("--buffer", "shared")),
            (("--seconds", "0"), ("--seconds",)),
            (("--iterations", "-1"), ("--iterations",)),
            (("--iterations", "0"), ("--iterations = 0",)),
            (("--iterations", "1000000000000000"), ("--iterations = 1000000000000000", "at most 1000000000")),
            (("--iterations", "1", "--seconds", "1"), ("stands in place of --seconds",)),
        ):
            done = run("bench", "comm", *flags)
            last = self.refusal(done)
            for word in words:
                self.assertIn(word, last)
            self.assertNotIn("ranks over", done.stderr)

    def test_under_a_launcher_the_ranks_are_the_launchers(self):
        command = (TESSERA, "bench", "comm", "--json", "--iterations", "5", "--bytes", "4K", "--backend", "gloo")
        done = run("run", "--standalone", "--nproc-per-node=3", "--", *command)
        self.assertEqual(done.returncode, 0, done.stderr)
        (row,) = [json.loads(line) for line in done.stdout.splitlines()]
        self.assertEqual(row["ranks"], 3)
        done = run("run", "--standalone", "--nproc-per-node=2", "--", *command[:-1], "gloo,shm")
        self.assertIn("--backend", self.refusal(done))


if __name__ == "__main__":
    unittest.main()
