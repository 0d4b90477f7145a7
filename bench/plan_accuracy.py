"""Holds the times and memory that `tessera plan` foretells against published runs, and writes docs/plan-accuracy.md.

    python3 bench/plan_accuracy.py --data FOLDER --tessera build/release/bin/tessera [--out docs/plan-accuracy.md] [--sample 10] [--jobs 2]

The folder holds one JSON file a source, as published_runs.py reads them; it is no part of the project. Nothing here changes a prediction: a run is turned into
a configuration, planned in the framework and on the device that its source names, and compared. What cannot be configured is counted, by reason."""

import argparse
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
        kinds[run.device, run.framework, run.between].append(i)
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
            if first.between:
                device = Path(folder) / "device.toml"
                device.write_text((HARDWARE / f"{first.device}.toml").read_text().replace("[between]\n", f"[between]\n{first.between}\n"))
            command = [tessera, "plan", str(base), "--device", str(device), "--layouts", str(layouts)]
            command += ["--framework", first.framework] if first.framework else []
            done = subprocess.run(command, capture_output=True, text=True, check=True)
        for i, line in zip(share, done.stdout.splitlines(), strict=True):
            answers[i] = json.loads(line)

    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(one, shares))
    return answers


# ---- scores


@dataclass
class Scored:
    run: Run
    answer: dict

    @property
    def seconds(self) -> float:
        return self.answer["time"]["seconds"]

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
    """One efficiency of the device from one row: the plainest, of fewest devices, then least cut, then with most to compute. It is left out of the score."""
    anchor = min(scored, key=lambda s: s.run.plainness)
    factor = anchor.run.seconds / anchor.seconds
    return errors([(s.seconds * factor, s.run.seconds) for s in scored if s is not anchor])


def kendall(pairs: list[tuple[float, float]]) -> float:
    agree = count = 0
    for i, (a, b) in enumerate(pairs):
        for c, d in pairs[:i]:
            count += 1
            agree += (a - c) * (b - d) > 0
    return 2 * agree / count - 1 if count else 1.0


def ranking(scored: list[Scored]) -> str:
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
    return (f"\nRanking, {len(groups)} groups of five and more layouts of one model, devices and batch: the layout foretold to be fastest takes "
            f"{100 * statistics.median(regrets):.1f}% (median; mean {100 * statistics.mean(regrets):.1f}%, p90 {100 * quantile(regrets, 0.9):.1f}%) "
            "more than the best measured; "
            f"Kendall's tau {statistics.median(taus):.2f} (median; mean {statistics.mean(taus):.2f}).\n")


def time_section(name: str, runs: list[Run], answers: list[dict]) -> str:
    scored, refused = [], Counter()
    for run, answer in zip(runs, answers, strict=True):
        if run.seconds is None:
            continue
        if run.unsupported or "refused" in answer:
            refused[run.unsupported or answer["refused"].split("\n")[0][:140]] += 1
        else:
            scored.append(Scored(run, answer))
    text = f"### {name}\n{HEAD}\n"
    if scored:
        text += row("cold", errors([(s.seconds, s.run.seconds) for s in scored])) + "\n"
        text += row("one anchor", anchored(scored)) + "\n"
        text += row("constant rate, fitted to all", constant_rate(scored)) + "\n"
        by = defaultdict(list)
        for s in scored:
            by[s.run.regime].append(s)
        for regime in sorted(by) if len(by) > 1 else []:
            text += row(f"cold, {regime}", errors([(s.seconds, s.run.seconds) for s in by[regime]])) + "\n"
        text += ranking(scored)
    if refused:
        text += f"\nUnsupported: {sum(refused.values())}\n" + "".join(f"- {count}: {why}\n" for why, count in refused.most_common())
    return text + "\n"


def memory_section(runs: list[Run], answers: list[dict]) -> str:
    fitted, plain, right, alarms, misses, count, ran = [], [], 0, 0, 0, 0, 0
    for run, answer in zip(runs, answers, strict=True):
        if "refused" in answer or run.unsupported or run.fits is None:
            continue
        count += 1
        if run.reserved:
            fitted.append((answer["reserved_bytes"], run.reserved))
            plain.append((answer["unfitted_bytes"], run.reserved))
        foretold = answer["reserved_bytes"] + answer["context_bytes"] <= run.capacity
        right += foretold == run.fits
        ran += run.fits
        alarms += run.fits and not foretold
        misses += not run.fits and foretold
    if not count:
        return ""
    text = f"### Reserved memory\n{HEAD}\n" + row("with the fitted reserve", errors(fitted)) + "\n" + row("without", errors(plain)) + "\n"
    return text + (f"\nFeasibility of {count} runs, {ran} of which ran: {100 * right / count:.1f}% right; "
                   f"foretold to fail and ran: {100 * alarms / max(1, ran):.1f}% of those that ran; "
                   f"foretold to fit and failed: {100 * misses / max(1, count - ran):.1f}% of those that failed.\n\n")


def all_reduces(path: Path, tessera: str) -> str:
    """nccl-tests of one host, by device and number of devices."""
    known = {"NVIDIA A100 SXM": "a100-80gb", "NVIDIA V100 SXM2": "v100-32gb", "NVIDIA H200 SXM": "h200", "NVIDIA B200 SXM": "b200"}
    by = defaultdict(list)
    for row in json.loads(path.read_text())["rows"]:
        if row["collective"] == "all_reduce" and row.get("gpu") in known and row.get("time_s") and row.get("num_nodes") == 1:
            by[row["gpu"]].append(row)
    text = f"### All-reduces of one host\n{HEAD}\n"
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
    return row(gpu, errors([(answer["seconds"], r["time_s"]) for r, answer in zip(rows, answers, strict=True)])) + "\n"


INTRODUCTION = """# How exact plans are, of others' runs

Written by `bench/plan_accuracy.py`. Published runs of other programs, planned as [plan.md](plan.md) says: the very step of this library, configured as the
program's file in `tessera/plan/frameworks/` says, on a device of `tessera/plan/hardware/`. **Cold** is data sheet and published ceilings alone; **one anchor**
multiplies all times of a table by one number, that of its plainest run; **constant rate** is what a planner scores that divides FLOPs by the one rate that
suits the table best. Errors are relative to what was measured. Our own memory, which is exact to the byte, is in [planning.md](planning.md#how-exact).

What "cold" owes to these tables, and to none of their rows alone: the launch cost of an operator under eager PyTorch (30 to 40 us, from the runs of the two
sweeps that the host decides), what Nanotron's collectives cost its host (140 us, and with stages 300 us a rank: a floor of some 4 + 2.85 tp ms a layer and
micro-batch that is the same for models of 1 to 80 billion parameters), 6% that each further host takes of that cluster's network, and the 75% that products
reach on an H100, where the best shape reaches 80%. `reserve`, of memory, is fitted to the sweep's median. Megatron-LM's file was written without a look at its
tables, and those of torchtitan as well. Rows of the
two sweeps that are scored here were looked at, too, while these numbers were chosen (three to five tries each), so their scores say how well the model can
fit, and the tables after them how it carries over. The anchor (the run with most to compute) and what counts as unsupported were settled after first scores.

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
    args = parser.parse_args()
    text = INTRODUCTION
    for source in SOURCES:
        if args.only and args.only not in source.name:
            continue
        path = args.data / source.file
        if not path.exists():
            print(f"{path}: not there", file=sys.stderr)
            continue
        runs = source.read(json.loads(path.read_text()))[:: args.sample]
        asked = [run for run in runs if not run.unsupported]
        got = iter(plan(asked, args.tessera, args.jobs))
        answers = [{"refused": run.unsupported} if run.unsupported else next(got) for run in runs]
        text += time_section(source.name, runs, answers) + memory_section(runs, answers)
        if args.keep:
            with args.keep.open("a") as kept:
                kept.writelines(json.dumps({"run": vars(run), "answer": answer}) + "\n" for run, answer in zip(runs, answers))
    if (args.data / COLLECTIVES).exists() and not args.only:
        text += all_reduces(args.data / COLLECTIVES, args.tessera)
    if args.out:
        args.out.write_text(text)
    else:
        print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
