"""`make bench`: tessera beside its peers, in turns within one run, and beside the bound of the machine.

Every setting of bench/comparisons.py starts its peers, which then wait, and asks each side for a few steps in turn (A B A B), so that what else
happens on the machine meets both. Results: a table on stdout, build/bench/results.md and build/bench/results.json (every step's time).

  tools/peer_python bench/run.py [--quick] [--only "vocab bf16"]
"""

import argparse
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path

import compression
import recompute
from communication import CommunicationReport
from comparisons import QUICK_SETTINGS, SETTINGS, Setting
from report import Report, table
from sides import ROOT, Peer, SideFailed, Tessera, progress

sys.path.insert(0, str(ROOT / "bench" / "peers"))
from recipe import read_recipe  # noqa: E402

COMMUNICATION, COMPRESSION, RECOMPUTE = "communication", "compression", "recomputation"  # what --only calls the sections beside the settings
STANDARD_FIELDS = {"real_time", "cpu_time", "bytes_per_second", "items_per_second"}  # of Google Benchmark; other numbers are a benchmark's own
TEXT_BYTES = 200_000  # more than the windows of any run here, so that no step sees a text again


def wanted(name: str, only: str | None) -> bool:
    return not only or only in name


def write_text(path: Path) -> None:
    """Made-up words, the same in every run."""
    generator = random.Random(0)
    letters = "etaoinshrdlucmfwypvbgkjqxz"
    words = ["".join(generator.choices(letters, k=generator.randint(2, 9))) for _ in range(2000)]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(" ".join(generator.choices(words, k=TEXT_BYTES // 6)))


def machine() -> str:
    """Processor, cores and library: what a number without is worth nothing."""
    processor = platform.processor() or "unknown processor"
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            processor = line.split(":", 1)[1].strip()
            break
    torch = subprocess.run([ROOT / "tools" / "python", "-c", "import torch; print(torch.__version__)"], capture_output=True, text=True, check=True).stdout.strip()
    commit = subprocess.run(["git", "-C", ROOT, "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip() or "no commit"
    return f"{len(os.sched_getaffinity(0))} cores of {processor}, torch {torch}, commit {commit}, {time.strftime('%Y-%m-%d')}"


def measure(setting: Setting, binary: Path, scratch: Path, report: Report, start: float) -> None:
    recipe_file = setting.recipe(ROOT)
    recipe = read_recipe(recipe_file)
    progress(f"{setting.name}: starting {len(setting.peers)} peers", start)
    ours = Tessera(binary, recipe_file, setting.our_settings(recipe.global_size), setting.ranks, scratch)
    peers = {}
    try:
        for index, kind in enumerate(setting.peers):
            place = scratch / f"peer_{index}"
            if kind.ours:
                peers[kind] = Tessera(binary, recipe_file, setting.our_settings(recipe.global_size, kind), setting.ranks, place)
            else:
                peers[kind] = Peer(recipe_file, setting.peer_arguments(kind), place)
        plain_kind, plain = next((kind, peer) for kind, peer in peers.items() if not kind.ours)
        bounds, local_steps = [], []
        for turn in range(setting.turns):
            progress(f"{setting.name}: turn {turn + 1} of {setting.turns}", start)
            for side in (ours, *peers.values()):
                side.steps(setting.steps)
            bounds.append(plain.bound())
            if setting.ranks > 1 and plain_kind.has_local_steps:
                local_steps += plain.local_steps(setting.steps)
        theirs = {kind: peer.finish() for kind, peer in peers.items()}
        bound = {key: statistics.median(b[key] for b in bounds) for key in bounds[0]}
        exposed = plain.measured.median_s - statistics.median(local_steps) if local_steps else None
        planned = ours.planned() if setting.stage else None
        report.add(setting, recipe.tokens_per_step, ours.finish(), theirs, bound, exposed, planned)
    finally:
        for peer in peers.values():
            peer.close()


def micro_benchmarks(binary: Path) -> str:
    """The rooms' own Google Benchmark binaries, where they are built."""
    rows, texts = [], []
    for path in sorted(binary.parent.glob("tessera_*_bench")):
        run = subprocess.run([path, "--benchmark_format=json", "--benchmark_min_time=0.1"], capture_output=True, text=True)
        if run.returncode != 0:
            raise SideFailed(f"{path.name} ended with {run.returncode}:\n{run.stderr[-2000:]}")
        if not run.stdout.startswith("{"):  # a table of its own, such as bytes a parameter
            texts.append(f"```\n{run.stdout.strip()}\n```")
            continue
        for result in json.loads(run.stdout)["benchmarks"]:
            counters = ", ".join(f"{key} {value:.3g}" for key, value in result.items() if key not in STANDARD_FIELDS and isinstance(value, float))
            room = path.name.removeprefix("tessera_").removesuffix("_bench")
            rows.append([room, result["name"], f"{result['real_time']:.1f} {result['time_unit']}", counters])
    if not rows and not texts:
        return ""
    return "\n\n".join(["**Parts** (Google Benchmark, one binary per room)", table(["room", "what", "time", "counters"], rows), *texts])


def publish(page: Path, markdown: str) -> None:
    begin, end = "<!-- results -->\n", "<!-- /results -->"
    text = page.read_text()
    head, tail = text[: text.index(begin) + len(begin)], text[text.index(end) :]
    page.write_text(head + markdown + tail)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--binary", type=Path, default=ROOT / "build" / "release" / "bin" / "tessera")
    parser.add_argument("--quick", action="store_true", help="about 2 minutes: no torch.compile, no large model")
    parser.add_argument("--only", help="settings whose name contains this")
    parser.add_argument("--no-parts", action="store_true", help="leave out the rooms' own benchmarks")
    parser.add_argument("--publish", action="store_true", help="put the tables into docs/benchmarks.md")
    parser.add_argument("--strict", action="store_true", help="exit 1 where a goal is missed")
    options = parser.parse_args()
    if not options.binary.exists():
        print(f"bench: {options.binary} does not exist; run `make build` first", file=sys.stderr)
        return 2
    settings = [s for s in (QUICK_SETTINGS if options.quick else SETTINGS) if wanted(s.name, options.only)]
    names = [*(s.name for s in SETTINGS), COMMUNICATION, COMPRESSION, RECOMPUTE]
    if not any(wanted(name, options.only) for name in names):
        print(f"bench: --only {options.only!r} names no setting; there are: {', '.join(names)}", file=sys.stderr)
        return 2

    out = ROOT / "build" / "bench"
    write_text(out / "text.txt")
    start = time.monotonic()
    report = Report(machine())
    sections = []
    try:
        parts = "" if options.no_parts else micro_benchmarks(options.binary)  # first: a part that fails costs no more than the parts
        for setting in settings:
            measure(setting, options.binary, out / setting.name.replace(" ", "_"), report, start)
        if settings:
            sections.append(report.markdown())
        if wanted(COMMUNICATION, options.only):
            communication = CommunicationReport()
            communication.run(options.binary, options.quick, start)
            sections.append(communication.markdown())
            report.missed += communication.missed
            report.raw.append({"setting": COMMUNICATION, "times_us": communication.times})
        if wanted(COMPRESSION, options.only) and not options.quick:
            sections.append(compression.measure(options.binary, out, steps=2, turns=2, start=start))
        if wanted(RECOMPUTE, options.only) and not options.quick:
            section, missed = recompute.measure(options.binary, start)
            sections.append(section)
            report.missed += missed
    except SideFailed as failure:
        print(f"bench: {failure}", file=sys.stderr)
        return 1
    markdown = "\n\n".join([report.machine, *sections, *([parts] if parts else [])]) + "\n"
    print(markdown)
    (out / "results.md").write_text(markdown)
    (out / "results.json").write_text(json.dumps({"machine": report.machine, "settings": report.raw}, indent=1))
    if options.publish:
        publish(ROOT / "docs" / "benchmarks.md", markdown)
    for miss in report.missed:
        print(f"goal missed: {miss}")
    progress(f"done; {out / 'results.md'} and results.json hold the results", start)
    return 1 if options.strict and report.missed else 0


if __name__ == "__main__":
    sys.exit(main())
