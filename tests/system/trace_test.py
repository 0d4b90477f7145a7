"""`tessera trace`: what a run's timeline says beside what its schedule foretells, drawn, written and refused."""

import json
import unittest
import xml.dom.minidom

from support import SystemTest, run

P, M = 2, 6  # of the run: 12 sequences in micro-batches of 2


class Trace(SystemTest):
    def shown(self, *arguments):
        done = run("trace", *arguments, "--json")
        self.assertEqual(done.returncode, 0, done.stderr)
        return json.loads(done.stdout)

    def test_a_run_is_measured_and_held_against_its_schedule_and_others(self):
        _, log = self.train("run", nproc=P, sets=(f"mesh.pp={P}", "run.steps=5", "log.timeline_every=2"))
        lines = [json.loads(line) for line in (log / "timeline.jsonl").read_text().splitlines()]
        self.assertEqual([(line["step"], line["rank"], line["name"]) for line in lines], [(2, 0, "1f1b"), (4, 0, "1f1b")])
        foretold = json.loads(run("schedule", "1f1b", "--stages", P, "--micro-batches", M, "--json").stdout)
        self.assertLess(set(foretold), set(lines[0]))  # one format, with more of what was measured
        self.assertEqual(lines[0]["actions"], foretold["actions"])

        picture, events = self.folder / "t.svg", self.folder / "t.json"
        shown = self.shown(log, "--svg", picture, "--trace", events)
        self.assertEqual(shown["measured"], lines[1])
        self.assertEqual(shown["against"]["actions"], lines[1]["actions"])
        busy = sum(end - start for rank in lines[1]["timeline"] for start, end in rank)
        self.assertAlmostEqual(shown["measured"]["bubble_fraction"], 1 - busy / (P * lines[1]["makespan"]), places=6)
        self.assertAlmostEqual(sum(rank["busy_ms"] for rank in shown["ranks"]), busy, places=6)
        self.assertAlmostEqual(sum(end - start for rank in shown["against"]["timeline"] for start, end in rank), busy, places=6)  # their means, as often
        for stage, cost in enumerate(shown["stages"]):
            forwards = [end - start for action, (start, end) in zip(lines[1]["actions"][stage], lines[1]["timeline"][stage]) if "F" in action]
            self.assertAlmostEqual(cost["forward_ms"], sum(forwards) / M, places=6)
        self.assertEqual(len(xml.dom.minidom.parse(str(picture)).getElementsByTagName("title")), 2 * P * M * 2)
        trace = json.loads(events.read_text())["traceEvents"]
        self.assertEqual({event["pid"] for event in trace}, {0, 1})
        self.assertTrue(any(event.get("cat") == "wait" for event in trace))

        self.assertEqual(self.shown(log, "--step", 2)["measured"], lines[0])
        other = self.shown(log, "--against", "zb_h1")
        self.assertIn("0I0", other["against"]["actions"][0])
        saved = self.folder / "foretold.json"
        saved.write_text(json.dumps(foretold))
        self.assertEqual(self.shown(log, "--against", saved)["against"]["makespan"], foretold["makespan"])
        self.assertEqual(self.shown(saved)["measured"]["makespan"], foretold["makespan"])
        text = run("trace", log).stdout
        for words in ("measured: 1f1b, 2 ranks, 6 micro-batches, step 4", "makespan ms", "bubble", "a message takes", "rank ", "stage "):
            self.assertIn(words, text)

        for arguments, words in (
            ((self.folder / "none",), ("no such run or file", "log.timeline_every=1")),
            ((self.folder,), ("holds no timeline.jsonl", "log.timeline_every=1")),
            ((self.recipe,), ("run.toml, line 1", "is no JSON")),
            ((log, "--step", 3), ("--step 3", "step 2 of rank 0, step 4 of rank 0")),
            ((log, "--rank", 1), ("--rank 1",)),
            ((log, "--against", "zb_h"), ("--against = zb_h", "did you mean")),
            ((log, "--against", "zb_v"), ("--against = zb_v", "4 stages on 2 ranks", "has 2")),
            ((log, "--svg", log / "timeline.jsonl"), ("--svg", "would be overwritten")),
            ((log, "--svg", log / "metrics.jsonl"), ("--svg", "would be overwritten")),
            ((log / "timeline.jsonl", "--trace", log / "config.toml"), ("--trace", "would be overwritten")),
            ((saved, "--against", log, "--svg", log / "metrics.jsonl"), ("--svg", "would be overwritten")),
            ((log, "--against", "zb_auto"), ("--against = zb_auto", "a limit of memory", "--memory-limit")),
            ((log, "--svg", "/nowhere/t.svg"), ("--svg = /nowhere/t.svg", "folder")),
        ):
            last = self.refusal(run("trace", *arguments))
            for word in words:
                self.assertIn(word, last)
        (log / "timeline.jsonl").write_text(json.dumps(lines[0] | {"rank_of_stage": [0, 7]}) + "\n")
        self.assertIn("timeline.jsonl, line 1: rank_of_stage names rank 7", self.refusal(run("trace", log)))

    def test_a_run_without_it_writes_none_and_drops_an_earlier_ones(self):
        _, log = self.train("run", nproc=P, sets=(f"mesh.pp={P}", "run.steps=1", "optim.warmup_steps=0", "log.timeline_every=1"))
        self.train("run", nproc=P, sets=(f"mesh.pp={P}", "run.steps=1", "optim.warmup_steps=0"))
        self.assertIn("is empty", self.refusal(run("trace", log)))
        last = self.refusal(run("train", self.recipe, "--set", "log.timeline_every=-1"))
        self.assertIn("log.timeline_every", last)

    def test_a_timeline_that_a_schedule_is_made_for_is_not_begun_anew(self):
        sets = (f"mesh.pp={P}", "run.steps=1", "optim.warmup_steps=0")
        _, log = self.train("run", nproc=P, sets=(*sets, "log.timeline_every=1"))
        timeline = log / "timeline.jsonl"
        before = timeline.read_bytes()
        for source in (log, timeline):
            made_for = (*sets, "pipeline.schedule=zb_1p", f"pipeline.costs_from={source}")
            last = self.refusal(self.train("run", nproc=P, sets=made_for, expect=2)[0])
            self.assertIn(f"pipeline.costs_from = {source}: is in log.dir, where this run begins its own timeline.jsonl", last)
        self.assertEqual(timeline.read_bytes(), before)
        self.train("other", nproc=P, sets=made_for)
        self.assertEqual(timeline.read_bytes(), before)


if __name__ == "__main__":
    unittest.main()
