"""The parts of tools/bench that are arithmetic: spreads, verdicts, which sections run and for how long. Nothing is measured here."""

import contextlib
import io
import subprocess
import sys
import tempfile
import time
import types
import unittest
from pathlib import Path
from unittest import mock

from processes import alive
from support import SOURCE

sys.path.insert(0, str(SOURCE / "bench"))
import communication  # noqa: E402
import plan  # noqa: E402
import run as bench  # noqa: E402
import sides  # noqa: E402
from report import Report, against_goal  # noqa: E402
from sides import Clock, Measurement, OutOfTime, Peer, Tessera, output_of  # noqa: E402
from spread import KEPT, MISSED, OPEN, Spread, goes_on, pair_ratios, turn_order, verdict  # noqa: E402


class Bench(unittest.TestCase):
    def test_a_goal_is_missed_only_where_the_spread_excludes_it(self):
        around = Spread.of([0.79, 1.15, 0.9, 1.0])  # one row of a busy machine
        self.assertEqual((around.least, around.most, around.count), (0.79, 1.15, 4))
        self.assertEqual(verdict(around, 1.1), OPEN)
        self.assertEqual(verdict(around, 0.95), KEPT)
        self.assertEqual(verdict(around, 1.2), MISSED)
        self.assertEqual(verdict(Spread.of([0.5]), 1.1), OPEN, "one pair excludes nothing")
        self.assertEqual([verdict(around, goal, smaller_is_better=True) for goal in (1.0, 0.8, 0.7)], [KEPT, OPEN, MISSED])
        self.assertEqual(against_goal(around, 1.1), "0.95 [0.79, 1.15] (>= 1.1: open)")
        self.assertEqual(against_goal(0.6, 0.5, True), "0.60 (<= 0.5: NO)", "bytes do not vary")

    def test_ratios_are_of_pairs_of_turns(self):
        # The machine is half as fast in the second turn: each pair still says 1.5.
        self.assertEqual(pair_ratios([[1.0, 9.0, 1.0], [2.0]], [[1.5], [3.0]]), [1.5, 1.5])
        sides = ["ours", "eager", "chunked"]
        self.assertEqual([turn_order(sides, turn)[0] for turn in range(4)], ["ours", "chunked", "ours", "chunked"])
        self.assertEqual(sorted(turn_order(sides, 1)), sorted(sides))

    def test_turns_go_on_while_there_is_time(self):
        self.assertTrue(goes_on(0, 3, 8, 0, 240))
        self.assertTrue(goes_on(2, 3, 8, 400, -10), "the least, however long")
        self.assertFalse(goes_on(3, 3, 8, 600, 100))
        self.assertTrue(goes_on(3, 3, 8, 30, 100))
        self.assertFalse(goes_on(8, 3, 8, 8, 100))
        self.assertFalse(goes_on(1, 2, 5, 60, 100, run_left_s=50), "a run that has promised to end")
        self.assertFalse(goes_on(0, 2, 5, 0, 100, run_left_s=-1))

    def test_only_runs_nothing_else(self):
        names = lambda *a: [section.name for section in plan.choose(*a)]  # noqa: E731
        self.assertEqual(names("communication", False), ["communication"])
        self.assertEqual(names("vocab bf16", False), ["vocab bf16"])
        self.assertEqual(names("vocab bf16", True), ["vocab bf16"])
        self.assertEqual(names("parts", False), ["parts"])
        self.assertEqual(names("nothing", False), [])
        self.assertEqual(names("matmul bf16", False), ["matmul bf16"], "a whole name stands for itself")
        self.assertEqual(names("vocab fp32 x2, optim,matmul b", False), ["vocab fp32 x2", "matmul bf16", "matmul bf16 recompute", "optimizers"])
        everything = names(None, False)
        self.assertEqual(sorted(everything), sorted(plan.names()))
        self.assertEqual(everything[-1], "parts", "they take minutes, and nobody waits for them")
        self.assertNotIn("parts", names(None, False, False))
        quick = names(None, True)
        self.assertTrue({"vocab fp32", "vocab bf16", "communication"} <= set(quick))
        self.assertFalse({"parts", "recomputation", "compression", "matmul fp32"} & set(quick))

    def test_a_quick_run_shares_its_time_and_ends(self):
        clock = Clock(plan.QUICK_S, plan.TAIL_S)
        self.assertAlmostEqual(clock.left(), plan.QUICK_S - plan.TAIL_S, delta=1)
        self.assertAlmostEqual(clock.to_end(), plan.QUICK_S, delta=1)
        left, shares = plan.QUICK_S - plan.TAIL_S, []
        for sections in (4, 3, 2, 1):
            shares.append(plan.share_of(left, sections))
            left -= shares[-1]
        self.assertAlmostEqual(sum(shares), plan.QUICK_S - plan.TAIL_S)
        over = Clock(limit_s=0)
        self.assertRaises(OutOfTime, over.timeout)
        self.assertIsNone(Clock().timeout())

    def out_of_time_in_turn(self, last, memory=True):
        """What is measured where the peers' time is over in turn `last`, counted from 1, or, without `memory`, as they are asked for it; afterwards they cannot
        be asked anything."""

        class Side:
            def __init__(self, *_):
                self.measured = Measurement()

            def steps(self, _):
                self.measured.turns.append([1.0, 1.0])

            def note_memory(self):
                self.measured.peak_bytes = self.measured.resident_bytes = 3 << 20

            def finish(self):
                return self.measured

            def close(self):
                pass

        class Dying(Side):
            def steps(self, count):
                if len(self.measured.turns) + 1 == last:
                    raise OutOfTime
                super().steps(count)

            def note_memory(self):
                if not memory or len(self.measured.turns) + 1 >= last:
                    raise OutOfTime
                super().note_memory()

            def bound(self):
                return {"products_s": 0.5, "attention_products_s": 0.1}

        recipe = types.ModuleType("recipe")
        recipe.read_recipe = lambda _: types.SimpleNamespace(global_size=8, tokens_per_step=2048)
        with mock.patch.dict(sys.modules, recipe=recipe), mock.patch.multiple(bench, Tessera=Side, Peer=Dying):
            setting = next(s.setting for s in plan.choose(None, True) if s.kind == "setting" and s.setting.ranks == 1)
            return bench.measure(setting, Path("none"), Path("none"), Clock(1000), True, 1000)

    def test_out_of_time_whole_turns_stand(self):
        self.assertRaises(OutOfTime, self.out_of_time_in_turn, 1)
        for last in (3, 4):
            raw = self.out_of_time_in_turn(last).raw[0]
            self.assertEqual(len(raw["tessera"]["turns"]), last - 1)
            for peer in raw["peers"].values():
                self.assertEqual((len(peer["turns"]), peer["peak_bytes"]), (last - 1, 3 << 20), "known when its time was over")
        report = self.out_of_time_in_turn(2, memory=False)
        self.assertEqual(len(report.raw[0]["tessera"]["turns"]), 1)
        self.assertRegex(report.markdown(), r"\| vocab fp32 \| eager +\| +3 \| +- \| +- \|")
        self.assertIn("1.00", report.markdown())

    def test_out_of_time_no_section_begins(self):
        begun, printed = [], io.StringIO()
        with (mock.patch.multiple(bench, machine=lambda: "a machine", write_text=lambda _: None, run_section=lambda *a: begun.append(a)),
              mock.patch.multiple(plan, QUICK_S=0), mock.patch.object(sys, "argv", ["bench", "--quick", "--binary", sys.executable]),
              contextlib.redirect_stdout(printed)):
            self.assertEqual(bench.main(), 0)
        self.assertEqual(begun, [])
        self.assertEqual(printed.getvalue().count("not measured: "), len(plan.choose(None, True)))

    def test_out_of_time_whole_turns_of_communication_stand(self):
        def report(calls):
            """Where the time is over after so many commands; a turn has two."""
            left = iter(range(calls))

            def rows_of(*_):
                if next(left, None) is None:
                    raise OutOfTime
                return {size: 1.0 for size in communication.SIZES}

            sides = {communication.OURS: [], communication.GLOO: []}
            with mock.patch.multiple(communication, rows_of=rows_of, commands=lambda *_: sides):
                found = communication.CommunicationReport()
                found.run(Path("none"), True, Clock())
                return found

        self.assertRaises(OutOfTime, report, 1)
        crowd = communication.CommunicationReport().crowd
        for calls, missing in ((3, f"The time was over: 1 of 2 turns of 2 ranks, 0 of 2 turns of {crowd} ranks."),
                               (5, f"The time was over: 0 of 2 turns of {crowd} ranks."), (7, f"The time was over: 1 of 2 turns of {crowd} ranks.")):
            self.assertTrue(report(calls).markdown().endswith(missing), report(calls).markdown())
            self.assertIn("4 KiB", report(calls).markdown())
        self.assertNotIn("The time was over", report(8).markdown())

    def test_what_holds_on_is_ended_in_time(self):
        """A process that does not hear SIGTERM, and one that it started, which keeps the output open."""
        with tempfile.TemporaryDirectory() as folder:
            stubborn = Path(folder) / "stubborn"
            stubborn.write_text("#!/bin/bash\ntrap '' TERM\necho '{}'\nsleep 60 &\necho $! >> " + folder + "/pids\nwait\nwait\n")
            stubborn.chmod(0o755)
            began = time.monotonic()
            self.assertRaises(OutOfTime, output_of, [stubborn], Clock(0.5))
            self.assertRaises(OutOfTime, Tessera(stubborn, Path("none"), [], 1, Path(folder), Clock(0.5)).steps, 1)
            with mock.patch.object(sides, "ROOT", Path(folder)):
                (Path(folder) / "tools").mkdir()
                (Path(folder) / "tools" / "peer_python").symlink_to(stubborn)
                peer = Peer(Path("none"), [], Path(folder), Clock(4, 1))
                self.assertEqual(peer.ask("step 1"), {}, "it lives")
                self.assertRaises(OutOfTime, peer.ask, "step 1")
                peer.close()
            self.assertLess(time.monotonic() - began, 40)  # they sleep for a minute
            pids = (Path(folder) / "pids").read_text().split()
            self.assertEqual((len(pids), [pid for pid in pids if alive(pid)]), (3, []))

    def test_the_command_lists_its_sections_and_refuses_unknown_ones(self):
        def listed(*flags):
            return subprocess.run([sys.executable, SOURCE / "bench" / "run.py", "--list", *flags], capture_output=True, text=True, timeout=60)

        self.assertEqual(listed("--only", "compression").stdout.split("\n"), ["compression", ""])
        refused = listed("--only", "everything")
        self.assertEqual(refused.returncode, 2)
        self.assertIn("names no section; there are: vocab fp32, ", refused.stderr)

    def test_a_report_states_the_spread_and_what_was_missed(self):
        peer = types.SimpleNamespace(name="eager", speed_goal=1.25, memory_goal=0.5, ours=False)
        setting = types.SimpleNamespace(name="vocab fp32", stage=0, ranks=1, bound_goal=0.85)
        ours = Measurement(turns=[[1.0, 1.0], [2.0, 2.0]], peak_bytes=1 << 20, resident_bytes=1 << 21)
        for factor, missed in ((1.5, 0), (1.1, 1)):
            theirs = Measurement(turns=[[factor], [2.4 * factor]], peak_bytes=4 << 20, resident_bytes=1 << 22)
            report = Report()
            report.add(setting, 2048, ours, {Key(peer): theirs}, [{"products_s": 0.9, "attention_products_s": 0.1}] * 2, None)
            self.assertIn(f"{1.1 * factor:.2f} [{factor:.2f}, {1.2 * factor:.2f}]", report.markdown())
            self.assertEqual(len([m for m in report.missed if "against" in m]), 0 if 1.2 * factor >= 1.25 else missed)

    def test_results_are_printed_and_kept_as_sections_end(self):
        with tempfile.TemporaryDirectory() as folder:
            results = bench.Results("a machine", Path(folder))
            results.add("vocab fp32", "a table", [{"setting": "vocab fp32"}], ["a goal"])
            self.assertIn("### vocab fp32\na table", (Path(folder) / "results.md").read_text(), "before the next section begins")
            results.add("communication", "another")
            self.assertIn("another", (Path(folder) / "results.md").read_text())

    def test_the_machine_names_its_number_formats(self):
        both = {"avx512_bf16": True, "amx_bf16": False, "avx512_fp16": True}
        self.assertEqual(bench.formats(both), "16-bit products by avx512_bf16, avx512_fp16")
        self.assertIn("no bf16 products (ONEDNN_MAX_CPU_ISA=AVX512_CORE)", bench.formats(both, "AVX512_CORE"))
        self.assertIn("no bf16 products: tessera widens", bench.formats({"avx2": True}))
        self.assertEqual(bench.formats(both, "", "fp32"), "TESSERA_CPU_FORMATS=fp32")
        source = (SOURCE / "tessera" / "kernels" / "products.cpp").read_text()
        for isa in bench.WITHOUT_BF16:
            self.assertIn(f'"{isa}"', source, "the two lists are one")


class Key:
    """A peer by its attributes, hashable as PeerKind is."""

    def __init__(self, peer):
        self.__dict__.update(vars(peer))


if __name__ == "__main__":
    unittest.main()
