"""`tessera schedule`: what it prints, writes, draws and refuses; and that PyTorch and we read each other's schedules."""

import json
import types
import unittest
import xml.dom.minidom

from support import SystemTest, run


class Schedule(SystemTest):
    def shown(self, *arguments):
        done = run("schedule", *arguments, "--json")
        self.assertEqual(done.returncode, 0, done.stderr)
        return json.loads(done.stdout)

    def test_numbers_are_those_of_the_papers(self):
        p, m = 4, 8
        for name, v, idle, work, peak in (
            ("naive", 1, (p - 1) * m, m, [1] * p),
            ("gpipe", 1, p - 1, m, [m] * p),
            ("1f1b", 1, p - 1, m, [4, 3, 2, 1]),
            ("interleaved", 2, p - 1, 2 * m, [(2 * (p - 1 - i) + p + 1) / 2 for i in range(p)]),
            ("breadth_first", 2, p - 1, 2 * m, [m] * p),
            ("zb_v", 2, p - 1, 6 * m, [p] * p),
        ):
            shown = self.shown(name, "--stages", p, "--micro-batches", m, "--virtual", v)
            self.assertAlmostEqual(shown["bubble_fraction"], idle / (work + idle), places=12)
            self.assertAlmostEqual(shown["bubble_over_ideal"], idle / work, places=12)
            self.assertEqual(shown["peak_activations"], peak)
            self.assertEqual([len(actions) for actions in shown["actions"]], [len(spans) for spans in shown["timeline"]])
            self.assertEqual(max(spans[-1][1] for spans in shown["timeline"]), shown["makespan"])

    def test_costs_of_a_published_row(self):
        costs = ("--stages", 8, "--micro-batches", 24, "--costs", "18.522,18.086,9.337,0.601")
        for name, rate in (("1f1b", 0.2431), ("zb_h1", 0.1585), ("zb_h2", 0.1083)):
            self.assertAlmostEqual(self.shown(name, *costs)["span_bubble_rate"], rate, delta=5e-5)
        self.assertLess(self.shown("zb_2p", *costs, "--kept", 0.5)["span_bubble_rate"], 0.046)

    def test_text_has_the_grid_and_the_list_every_name(self):
        done = run("schedule", "1f1b", "--stages", 2, "--micro-batches", 2)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("rank 0 F0 F1 .  .  B0 =  .  B1 =\nrank 1 .  F0 B0 =  F1 B1 =  .  .\n", done.stdout)
        self.assertIn("peak activations, in micro-batches of a rank's share: 2 1\n", done.stdout)
        listed = run("schedule", "--list").stdout
        for name in ("naive", "gpipe", "1f1b", "pipedream", "pipedream_2bw", "interleaved", "breadth_first", "zb_h1", "zb_v", "dualpipev"):
            self.assertRegex(listed, rf"(?m)^{name} ")
        rows = json.loads(run("schedule", "--list", "--json").stdout)
        self.assertEqual([row["name"] for row in rows], [line.split()[0] for line in listed.splitlines()[1 : len(rows) + 1]])

    def test_files_are_written_and_read_again(self):
        table, picture, trace = self.folder / "s.csv", self.folder / "s.svg", self.folder / "s.json"
        made = self.shown("zb_v", "--stages", 3, "--micro-batches", 4, "--csv", table, "--svg", picture, "--trace", trace)
        self.assertEqual([line.split(",") for line in table.read_text().splitlines()], made["actions"])
        self.assertEqual(self.shown(table)["actions"], made["actions"])
        self.assertEqual(self.shown(table, "--lower", "--csv", self.folder / "lowered.csv")["bubble_fraction"], made["bubble_fraction"])
        self.assertIn("0SEND_F0", (self.folder / "lowered.csv").read_text())
        self.assertEqual(self.shown(self.folder / "lowered.csv")["makespan"], made["makespan"])
        self.assertEqual(len(xml.dom.minidom.parse(str(picture)).getElementsByTagName("title")), 3 * 2 * 4 * 3)
        events = json.loads(trace.read_text())["traceEvents"]
        self.assertEqual(sum(event["ph"] == "X" for event in events), 3 * 2 * 4 * 3)

    def test_bad_input_is_refused_with_the_way_out(self):
        (self.folder / "hangs.csv").write_text("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n")
        (self.folder / "lacks.csv").write_text("0F0,0B0\n1F0\n")
        sizes = ("--stages", 4, "--micro-batches", 8)
        for arguments, words in (
            (("1fb1", *sizes), ("did you mean 1f1b?",)),
            (("interleaved", "--stages", 4, "--micro-batches", 9, "--virtual", 2), ("micro_batches = 9", "multiple of max(1, micro_batches / 4) = 2", "10")),
            (("dualpipev", "--stages", 4, "--micro-batches", 7), ("micro_batches = 7", "8")),
            (("zb_v", *sizes, "--virtual", 3), ("virtual_stages = 3", "take 2")),
            (("1f1b", "--micro-batches", 8), ("--stages: say",)),
            (("--list", "--json", "--csv", self.folder / "none.csv"), ("leave --csv out",)),
            (("--list", "1f1b"), ("leave name out",)),
            (("1f1b", "--stages", 4), ("--micro-batches: say",)),
            (("1f1b", "--stages", -1, "--micro-batches", 8), ("stages = -1",)),
            (("zb_auto", "--stages", -1, "--micro-batches", 8, "--memory-limit", 2), ("stages = -1",)),
            (("1f1b", *sizes, "--costs", "1,1"), ("--costs = 1,1", "F,B,W,comm")),
            (("1f1b", *sizes, "--costs", "1,one,1,0"), ("--costs = 1,one,1,0",)),
            (("1f1b", *sizes, "--costs", "0,1,1,0"), ("more than 0",)),
            (("1f1b", *sizes, "--costs", "1,1,-1,0"), ("--costs = 1,1,-1,0", "0 or numbers from")),
            (("1f1b", *sizes, "--costs", "-1,1,1,0"), ("--costs = -1,1,1,0", "0 or numbers from")),
            (("1f1b", *sizes, "--costs", "1,1,nan,0"), ("--costs = 1,1,nan,0",)),
            (("1f1b", *sizes, "--costs", "nan,1,1,0"), ("--costs = nan,1,1,0", "0 or numbers from")),
            (("zb_2p", *sizes, "--kept", "2"), ("kept = 2", "at most 1")),
            (("1f1b", *sizes, "--per-rank", "1,2"), ("--per-rank = 1,2", "give 4")),
            (("1f1b", *sizes, "--memory-limit", 3), ("memory_limit", "zb_auto")),
            *((("1f1b", *sizes, flag, 0), (f"{flag} = 0: expected 1 or more",)) for flag in ("--memory-limit", "--group", "--per-update")),
            (("1f1b", *sizes, "--csv", ""), ("--csv", "is empty: give a value, or leave the flag out")),
            (("1f1b", *sizes, "--svg", "/nowhere/s.svg"), ("--svg = /nowhere/s.svg", "folder")),
            (("1f1b", *sizes, "--csv", self.folder / "one", "--svg", self.folder / "." / "one"), ("--svg = ", "is where --csv is written, too")),
            ((self.folder / "none.csv",), ("none.csv", "cannot be read")),
            ((self.folder / "hangs.csv",), ("row 1 (rank 0), column 2", "deadlock", "0B0, which needs 1B0 of rank 1", "1F1, which needs 0F1 of rank 0")),
            ((self.folder / "lacks.csv",), ("row 2 (rank 1): 1B0 is missing",)),
            ((), ("--list",)),
        ):
            last = self.refusal(run("schedule", *arguments))
            for word in words:
                self.assertIn(word, last)

    def test_pytorch_reads_ours_and_we_read_theirs(self):
        from torch.distributed.pipelining import schedules as theirs

        for name, v in (("1f1b", 1), ("interleaved", 2), ("breadth_first", 2), ("zb_h1", 1), ("zb_v", 2), ("dualpipev", 2), ("v_half", 2)):
            table = self.folder / f"{name}.csv"
            p, m = 4, 8
            made = self.shown(name, "--stages", p, "--micro-batches", m, "--virtual", v, "--csv", table)
            actions = {rank: [theirs._Action.from_str(cell) for cell in row.split(",")] for rank, row in enumerate(table.read_text().splitlines())}
            rank_of = theirs._validate_schedule(actions, p, p * v, m)
            self.assertEqual([rank_of[stage] for stage in range(p * v)], made["rank_of_stage"])
            lowered = theirs._add_send_recv(actions, lambda stage, rank_of=rank_of: rank_of[stage], p * v)
            written = self.folder / f"{name}_lowered.csv"
            written.write_text("".join(",".join(map(str, lowered[rank])) + "\n" for rank in range(p)))
            self.assertEqual(self.shown(written)["makespan"], made["makespan"])

    def test_schedules_that_pytorch_makes_are_ours(self):
        from torch.distributed.pipelining import schedules as theirs

        p, m = 4, 8
        for kind, name, v in ((theirs.ScheduleInterleaved1F1B, "interleaved", 2), (theirs.ScheduleZBVZeroBubble, "zb_v", 2), (theirs.ScheduleDualPipeV, "dualpipev", 2)):
            schedule = types.SimpleNamespace(
                pp_group_size=p, n_local_stages=v, num_stages=p * v, _num_stages=p * v, _n_microbatches=m, number_of_rounds=m // p, microbatches_per_round=p
            )
            rows = []
            for rank in range(p):
                schedule.rank = rank
                rows.append([str(action) for action in kind._calculate_single_rank_operations(schedule, rank) if action is not None])
            self.assertEqual(self.shown(name, "--stages", p, "--micro-batches", m, "--virtual", v)["actions"], rows, name)


if __name__ == "__main__":
    unittest.main()
