"""Holds the times and memory that `tessera plan` foretells against published runs, and writes docs/plan-accuracy.md.

    python3 bench/plan_accuracy.py --data FOLDER --tessera build/release/bin/tessera [--out docs/plan-accuracy.md] [--sample 10] [--jobs 2] [--keep FILE]
    python3 bench/plan_accuracy.py --data FOLDER --tessera build/release/bin/tessera --kept FILE [--out docs/plan-accuracy.md]

The folder holds one JSON file a source, as published_runs.py reads them; it is no part of the project. Nothing here changes a prediction: a run is turned into
a configuration, planned in the framework and on the device that its source names, and compared. What cannot be configured is counted, by reason."""

import argparse
import hashlib
import json
import statistics
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from published_runs import SOURCES, Run

BASE = """[data]
files = ["-"]
[optim]
lr = 1e-4
[run]
steps = 10
"""
COLLECTIVES = "collectives_measured.json"
HARDWARE = Path(__file__).resolve().parent.parent / "tessera/plan/hardware"
PEAK = {"a100-80gb": 312e12, "h100": 989.4e12, "h200": 989.4e12}


def plan(runs: list[Run], tessera: str, jobs: int) -> list[dict]:
    """An answer for each, in their order. Runs of one device and framework share a process."""
    shares: list[list[int]] = []
    kinds = defaultdict(list)
    for i, run in enumerate(runs):
        kinds[run.device, run.framework, run.changes].append(i)
    for members in kinds.values():
        shares += [members[start::jobs] for start in range(jobs)]
    answers: list[dict] = [{} for _ in runs]

    def one(share: list[int]) -> None:
        if not share:
            return
        with tempfile.TemporaryDirectory() as folder:
            base, layouts = Path(folder) / "base.toml", Path(folder) / "layouts.jsonl"
            base.write_text(BASE)
            layouts.write_text("".join(json.dumps({"world": runs[i].world, "set": runs[i].sets}) + "\n" for i in share))
            first = runs[share[0]]
            device = first.device
            if first.changes:
                device, text = Path(folder) / "device.toml", (HARDWARE / f"{first.device}.toml").read_text()
                for old, new in first.changes:
                    assert text.count(old) == 1, f"{old!r} in {first.device}.toml"
                    text = text.replace(old, new)
                device.write_text(text)
            command = [tessera, "plan", str(base), "--device", str(device), "--layouts", str(layouts)]
            command += ["--framework", first.framework] if first.framework else []
            done = subprocess.run(command, capture_output=True, text=True, check=True)
        for i, line in zip(share, done.stdout.splitlines(), strict=True):
            answers[i] = json.loads(line)

    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(one, shares))
    return answers


def kept_answers(path: Path, runs: list[Run]) -> list[dict]:
    """Of an earlier run that kept them; one that was broken off lacks some."""
    key = lambda run: json.dumps([run["device"], run["framework"], run["world"], run["sets"]])  # noqa: E731
    known = {key(kept["run"]): kept["answer"] for kept in map(json.loads, path.open()) if not kept["run"]["unsupported"]}
    return [known.get(key(vars(run)), {"refused": "was not planned in this run"}) for run in runs]


# ---- goals


@dataclass
class Goal:
    """A bound, and what was reached of it."""

    of: str
    bound: float
    reached: float
    unit: str = "%"
    at_least: bool = False

    def row(self) -> str:
        met = self.reached >= self.bound if self.at_least else self.reached <= self.bound
        shown = (lambda v: f"{v:.2f}") if not self.unit else (lambda v: f"{100 * v:.1f}%")
        return f"| {self.of} | {'at least' if self.at_least else 'at most'} {shown(self.bound)} | {shown(self.reached)} | {'met' if met else 'missed by ' + shown(abs(self.reached - self.bound))} |"


GOALS: list[Goal] = []


def goals_table() -> str:
    return "| | goal | reached | |\n|---|---:|---:|---|\n" + "".join(goal.row() + "\n" for goal in GOALS) + "\n"


def median_size(signed: list[float]) -> float:
    return statistics.median(abs(e) for e in signed)


# ---- scores


@dataclass
class Scored:
    run: Run
    answer: dict

    @property
    def seconds(self) -> float:
        return self.answer["time"]["seconds"]

    @property
    def computing(self) -> float:
        """The share of a rank's own time in which its device computes."""
        time = self.answer["time"]
        return time["computing"] / (time["seconds"] - time["bubble"])

    @property
    def flops(self) -> float:
        """Of a device: what a constant rate is applied to."""
        return self.answer["time"]["mfu"] * self.seconds * PEAK[self.run.device]


def errors(pairs: list[tuple[float, float]]) -> list[float]:
    """Signed, relative to what was measured: (foretold, measured)."""
    return [foretold / measured - 1 for foretold, measured in pairs]


def quantile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def row(name: str, signed: list[float]) -> str:
    if not signed:
        return f"| {name} | 0 | | | | | |"
    size = [abs(e) for e in signed]
    cells = [statistics.mean(size), statistics.median(size), quantile(size, 0.9), max(size), statistics.median(signed)]
    return f"| {name} | {len(signed)} | " + " | ".join(f"{100 * c:.1f}%" for c in cells[:-1]) + f" | {100 * cells[-1]:+.1f}% |"


HEAD = "| | n | mean | median | p90 | max | signed (median) |\n|---|---:|---:|---:|---:|---:|---:|"


def constant_rate(scored: list[Scored]) -> list[float]:
    """The best single rate, which is itself fitted to all rows: what a model has to beat."""
    rate = statistics.median(s.flops / s.run.seconds for s in scored)
    return errors([(s.flops / rate, s.run.seconds) for s in scored])


def anchored(scored: list[Scored]) -> list[float]:
    """One efficiency of the device from one row: the plainest, of fewest devices, then least cut, then with most to compute. It is left out of the score. What
    the device computes takes as much longer as makes that row right; links and the host keep their times."""

    def slowed(s: Scored, factor: float) -> float:
        return s.seconds * (1 + (factor - 1) * s.computing)

    anchor = min(scored, key=lambda s: s.run.plainness)
    factor = 1 + (anchor.run.seconds / anchor.seconds - 1) / anchor.computing
    return errors([(slowed(s, factor), s.run.seconds) for s in scored if s is not anchor])


def is_held_out(run: Run) -> bool:
    """Half of all rows, by what was run: whatever is tuned from now on may look at the other half alone."""
    return hashlib.sha256(json.dumps([run.device, run.framework, run.world, sorted(run.sets)]).encode()).digest()[0] % 2 == 1


def kendall(pairs: list[tuple[float, float]]) -> float:
    agree = count = 0
    for i, (a, b) in enumerate(pairs):
        for c, d in pairs[:i]:
            count += 1
            agree += (a - c) * (b - d) > 0
    return 2 * agree / count - 1 if count else 1.0


def ranking(name: str, scored: list[Scored]) -> str:
    groups = defaultdict(list)
    for s in scored:
        if s.run.group:
            groups[s.run.group].append(s)
    groups = {k: v for k, v in groups.items() if len(v) >= 5}
    if not groups:
        return ""
    regrets, taus = [], []
    for members in groups.values():
        first = min(members, key=lambda s: s.seconds)
        regrets.append(first.run.seconds / min(s.run.seconds for s in members) - 1)
        taus.append(kendall([(s.seconds, s.run.seconds) for s in members]))
    GOALS.append(Goal(f"{name}: the layout chosen, over the best measured, median", 0.02, statistics.median(regrets)))
    GOALS.append(Goal(f"{name}: the same, mean", 0.02, statistics.mean(regrets)))
    GOALS.append(Goal(f"{name}: Kendall's tau, median", 0.7, statistics.median(taus), unit="", at_least=True))
    return (f"\nRanking, {len(groups)} groups of five and more layouts of one model, devices and batch: the layout foretold to be fastest takes "
            f"{100 * statistics.median(regrets):.1f}% (median; mean {100 * statistics.mean(regrets):.1f}%, p90 {100 * quantile(regrets, 0.9):.1f}%) "
            "more than the best measured; "
            f"Kendall's tau {statistics.median(taus):.2f} (median; mean {statistics.mean(taus):.2f}).\n")


def time_section(name: str, runs: list[Run], answers: list[dict], sweep: bool, note: str) -> str:
    scored, refused = [], Counter()
    for run, answer in zip(runs, answers, strict=True):
        if run.seconds is None:
            continue
        if run.unsupported or "refused" in answer:
            refused[run.unsupported or answer["refused"].split("\n")[0][:140]] += 1
        else:
            scored.append(Scored(run, answer))
    text = f"### {name}\n" + (f"{note}\n\n" if note else "") + f"{HEAD}\n"
    if scored:
        cold = errors([(s.seconds, s.run.seconds) for s in scored])
        text += row("cold", cold) + "\n"
        text += row("cold, rows held out", [e for e, s in zip(cold, scored) if is_held_out(s.run)]) + "\n"
        text += row("one anchor", anchored(scored)) + "\n"
        text += row("constant rate, fitted to all", constant_rate(scored)) + "\n"
        GOALS.append(Goal(f"{name}: cold, median", 0.15, median_size(cold)))
        GOALS.append(Goal(f"{name}: one anchor, median", 0.08, median_size(anchored(scored))))
        if sweep:
            GOALS.append(Goal(f"{name}: cold, over a constant rate's", 0.5, median_size(cold) / median_size(constant_rate(scored)), unit=""))
        by = defaultdict(list)
        for s in scored:
            by[s.run.regime].append(s)
        for regime in sorted(by) if len(by) > 1 else []:
            text += row(f"cold, {regime}", errors([(s.seconds, s.run.seconds) for s in by[regime]])) + "\n"
        text += ranking(name, scored)
    if refused:
        text += f"\nUnsupported: {sum(refused.values())}\n" + "".join(f"- {count}: {why}\n" for why, count in refused.most_common())
    return text + "\n"


def memory_section(runs: list[Run], answers: list[dict]) -> str:
    fitted, plain, held, alarms, misses, count, ran = [], [], [], 0, 0, 0, 0
    for run, answer in zip(runs, answers, strict=True):
        if "refused" in answer or run.unsupported or run.fits is None:
            continue
        count += 1
        if run.reserved:
            first = answer["first_rank_reserved_bytes"]  # which is the one that writes down what it has reserved
            fitted.append((first, run.reserved))
            plain.append((first * answer["unfitted_bytes"] / answer["reserved_bytes"], run.reserved))
            if is_held_out(run):
                held.append(fitted[-1])
        foretold = answer["reserved_bytes"] + answer["context_bytes"] <= run.capacity
        ran += run.fits
        alarms += run.fits and not foretold
        misses += not run.fits and foretold
    if not count:
        return ""
    # Of all that failed as of those of them that were planned.
    asked = [run for run in runs if run.is_scored and run.fits is not None]
    failed = sum(not run.fits for run in asked)
    wrong = (alarms / max(1, ran) * (len(asked) - failed) + misses / max(1, count - ran) * failed) / len(asked)
    GOALS.append(Goal("feasibility, right", 0.97, 1 - wrong, at_least=True))
    GOALS.append(Goal("feasibility, false alarms", 0.01, alarms / max(1, ran)))
    GOALS.append(Goal("reserved memory, median", 0.08, median_size(errors(fitted))))
    text = f"### Reserved memory\n{HEAD}\n" + row("with the fitted reserve", errors(fitted)) + "\n" + row("the same, rows held out", errors(held)) + "\n"
    text += row("without", errors(plain)) + "\n"
    return text + (f"\nFeasibility of {count} runs (of {len(asked)}; the rest was not planned), {ran} of which ran: {100 * (1 - wrong):.1f}% right; "
                   f"foretold to fail and ran: {100 * alarms / max(1, ran):.1f}% of those that ran; "
                   f"foretold to fit and failed: {100 * misses / max(1, count - ran):.1f}% of those that failed.\n\n")


def all_reduces(path: Path, tessera: str) -> str:
    """nccl-tests of one host, by device and number of devices."""
    known = {"NVIDIA A100 SXM": "a100-80gb", "NVIDIA V100 SXM2": "v100-32gb", "NVIDIA H200 SXM": "h200", "NVIDIA B200 SXM": "b200"}
    by = defaultdict(list)
    for row in json.loads(path.read_text())["rows"]:
        if row["collective"] == "all_reduce" and row.get("gpu") in known and row.get("time_s") and row.get("num_nodes") == 1:
            by[row["gpu"]].append(row)
    text = "### All-reduces of one host\nPairs of V100 are joined by one or two of six links, which a file of a device cannot say: groups of fewer than eight are "
    text += f"slower than planned.\n\n{HEAD}\n"
    for gpu, rows in sorted(by.items()):
        with tempfile.TemporaryDirectory() as folder:
            base, lines = Path(folder) / "base.toml", Path(folder) / "lines"
            base.write_text(BASE)
            lines.write_text("".join(json.dumps({"all_reduce": int(row["size_bytes"]), "world": row["num_gpus"]}) + "\n" for row in rows))
            command = [tessera, "plan", str(base), "--device", known[gpu], "--layouts", str(lines)]
            answers = [json.loads(line) for line in subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()]
        text += row_of_all_reduces(gpu, rows, answers)
    return text + "\n"


def row_of_all_reduces(gpu: str, rows: list[dict], answers: list[dict]) -> str:
    signed = errors([(answer["seconds"], r["time_s"]) for r, answer in zip(rows, answers, strict=True)])
    if "A100" in gpu:
        GOALS.append(Goal("all-reduces of A100, p90", 0.2, quantile([abs(e) for e in signed], 0.9)))
    return row(gpu, signed) + "\n"


INTRODUCTION = """# How exact plans are, of others' runs

Written by `bench/plan_accuracy.py`, of all rows but, of Nanotron's, most of those that ran out of memory, which count for feasibility alone. Published runs of other programs, planned as [plan.md](plan.md) says: the very step of this library, configured
as the program's file in `tessera/plan/frameworks/` says, on a device of `tessera/plan/hardware/`. **Cold** is data sheet and published ceilings alone; **one
anchor** takes the efficiency of what the device computes from one run, the plainest of each table; **constant rate** is what a planner scores that divides FLOPs
by the one rate that suits the table best. Errors are relative to what was measured. Our own memory, which is exact to the byte, is in
[planning.md](planning.md#how-exact).

What "cold" owes to these tables, and to none of their rows alone: the launch cost of an operator under eager PyTorch (30 to 40 us, from the runs of the two
sweeps that the host decides), what Nanotron's collectives cost its host (110 us, and with stages
210 us a rank, a floor that is the same for models of 1 to 80 billion parameters), what it holds of gradients beside their sums (2 bytes a parameter), 6% that each further host takes of that cluster's network, and the 75% that products
reach on an H100, where the best shape reaches 80%. `reserve`, of memory, is what the sweep's median reserves over what the allocator's
rules say (1.02). Rows of the two sweeps were looked at while these
numbers were chosen (three to five tries each). **Held out**, below, is half of all rows, by the hash of what was run, set apart after that: that the halves
score alike says that nothing was fitted to single rows, and no more; what is tuned from now on looks at the other half alone. Megatron-LM's
file was written without a look at its tables, and so was torchtitan's. Since their first scores three things changed, none of them a fitted number: torchtitan's
devices are planned as held to 500 W with the memory that its tables name, its recomputation as what its source does (the first score was 24.9%), and products of
fp16 as a device makes them, not a CPU (A100 tables). That the anchor moves what is computed, and not all of a step, was settled after scores of the other way:
9.7% of vTrain, 11.3% of torchtitan, 25.2% of SC21.

## Goals

"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", type=Path, required=True, help="folder of the published tables")
    parser.add_argument("--tessera", required=True, help="the command")
    parser.add_argument("--out", type=Path, help="where the report goes; else standard output")
    parser.add_argument("--only", help="tables whose name contains it")
    parser.add_argument("--sample", type=int, default=1, help="every n-th row")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--keep", type=Path, help="where runs and answers go, a JSON object a line")
    parser.add_argument("--kept", type=Path, help="such a file, from which the report is written, in place of planning")
    args = parser.parse_args()
    text = ""
    for source in SOURCES:
        if args.only and args.only not in source.name:
            continue
        path = args.data / source.file
        if not path.exists():
            print(f"{path}: not there", file=sys.stderr)
            continue
        runs = source.read(json.loads(path.read_text()))[:: args.sample]
        asked = [run for run in runs if run.is_scored]
        got = iter(kept_answers(args.kept, asked) if args.kept else plan(asked, args.tessera, args.jobs))
        answers = [next(got) if run.is_scored else {"refused": run.unsupported} for run in runs]
        text += time_section(source.name, runs, answers, source.sweep, source.note) + memory_section(runs, answers)
        if args.keep:
            with args.keep.open("a") as kept:
                kept.writelines(json.dumps({"run": vars(run), "answer": answer}) + "\n" for run, answer in zip(runs, answers))
    if (args.data / COLLECTIVES).exists() and not args.only:
        text += all_reduces(args.data / COLLECTIVES, args.tessera)
    text = INTRODUCTION + goals_table() + "## Tables\n\n" + text
    if args.out:
        args.out.write_text(text)
    else:
        print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
