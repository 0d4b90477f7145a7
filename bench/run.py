"""`make bench`: tessera beside its peers, in turns within one run, and beside the bound of the machine.

Every setting of bench/comparisons.py starts its peers, which then wait, and asks each side for a few steps in turn (A B, B A, A B), so that what else
happens on the machine meets both; ratios are of such pairs. A section's tables are printed as it ends, what runs meanwhile goes to stderr. Results also lie in
build/bench/results.md and results.json (every step's time).

  tools/bench [--quick] [--only "vocab bf16"]
  tools/bench --against OTHER/build/release/bin/tessera [--only vocab]     this build beside another, in turns, in the settings of --quick
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

import against
import compression
import context
import kernels
import mixture
import offload
import optimizers
import plan
import recompute
from communication import CommunicationReport
from comparisons import QUICK_SETTINGS, Setting
from publish import publish
from report import Report, table
from sides import ROOT, TIME_WAS_OVER, WARMUP_STEPS, Clock, OutOfTime, Peer, SideFailed, Tessera, output_of
from spread import goes_on, turn_order

sys.path.insert(0, str(ROOT / "bench" / "peers"))
STANDARD_FIELDS = {"real_time", "cpu_time", "bytes_per_second", "items_per_second"}  # of Google Benchmark; other numbers are a benchmark's own
TEXT_BYTES = 200_000  # more than the windows of any run here, so that no step sees a text again
PAIRS, QUICK_PAIRS = (3, 8), (2, 5)  # of turns: at least, at most
AGAINST_PAIRS = 5
QUICK_WARMUP_STEPS = 2  # of every process: less is warm then, on both sides
# What ONEDNN_MAX_CPU_ISA may name that has no bf16 products (tessera/kernels/products.cpp).
WITHOUT_BF16 = ("sse41", "avx", "avx2", "avx2_vnni", "avx2_vnni_2", "avx512_core", "avx512_core_vnni")


def write_text(path: Path) -> None:
    """Made-up words, the same in every run."""
    generator = random.Random(0)
    letters = "etaoinshrdlucmfwypvbgkjqxz"
    words = ["".join(generator.choices(letters, k=generator.randint(2, 9))) for _ in range(2000)]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(" ".join(generator.choices(words, k=TEXT_BYTES // 6)))


def formats(capabilities: dict, max_isa: str = "", forced: str = "") -> str:
    """Which 16-bit products the CPU has, as libtorch may use them."""
    if forced:
        return f"TESSERA_CPU_FORMATS={forced}"
    limit = f" (ONEDNN_MAX_CPU_ISA={max_isa})" if max_isa else ""
    found = [name for name in ("amx_bf16", "avx512_bf16", "amx_fp16", "avx512_fp16") if capabilities.get(name)]
    if max_isa.lower() in WITHOUT_BF16:
        found = []
    if not any(name.endswith("bf16") for name in found):
        return f"no bf16 products{limit}: tessera widens them to fp32, libtorch emulates them"
    return f"16-bit products by {', '.join(found)}{limit}"


def machine() -> str:
    """Processor, cores, number formats and library: what a number without is worth nothing."""
    processor = platform.processor() or "unknown processor"
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            processor = line.split(":", 1)[1].strip()
            break
    ask = "import json, torch; print(json.dumps([torch.__version__, {k: v for k, v in torch.cpu.get_capabilities().items() if isinstance(v, bool)}]))"
    answer = subprocess.run([ROOT / "tools" / "python", "-c", ask], capture_output=True, text=True, check=True).stdout.splitlines()[-1]
    torch, capabilities = json.loads(answer)
    commit = subprocess.run(["git", "-C", ROOT, "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip() or "no commit"
    multiplies = formats(capabilities, os.environ.get("ONEDNN_MAX_CPU_ISA", ""), os.environ.get("TESSERA_CPU_FORMATS", ""))
    return f"{len(os.sched_getaffinity(0))} cores of {processor}, {multiplies}, torch {torch}, commit {commit}, {time.strftime('%Y-%m-%d')}"


def note_memory(setting: Setting, sides: list, clock: Clock) -> None:
    """It takes a peer a step. In a run that has to end it comes early, for a peer whose time is over cannot be asked any more."""
    clock.say(f"{setting.name}: memory")
    try:
        for _, side in sides:
            side.note_memory()
    except OutOfTime:
        pass  # what was timed stands without it


def measure(setting: Setting, binary: Path, scratch: Path, clock: Clock, quick: bool, setting_s: float) -> Report:
    """Turns of all sides for about `setting_s`. Out of time, what whole turns have shown stands, with the memory that was known by then."""
    from recipe import read_recipe  # brings torch, which nothing else here needs

    recipe_file = setting.recipe(ROOT)
    recipe = read_recipe(recipe_file)
    warmup = QUICK_WARMUP_STEPS if quick else WARMUP_STEPS
    began = clock.passed()
    ours = Tessera(binary, recipe_file, setting.our_settings(recipe.global_size), setting.ranks, scratch, clock, warmup)
    peers, report = {}, Report()
    try:
        for index, kind in enumerate(setting.peers):
            clock.say(f"{setting.name}: starting {kind.name}")
            place = scratch / f"peer_{index}"
            if kind.ours:
                peers[kind] = Tessera(binary, recipe_file, setting.our_settings(recipe.global_size, kind), setting.ranks, place, clock, warmup)
            else:
                peers[kind] = Peer(recipe_file, setting.peer_arguments(kind), place, clock, warmup)
        plain_kind, plain = next((kind, peer) for kind, peer in peers.items() if not kind.ours)
        sides = [("tessera", ours), *((kind.name, peer) for kind, peer in peers.items())]
        bounds, local_steps = [], []
        least, most = QUICK_PAIRS if quick else PAIRS
        turns_began = clock.passed()
        while goes_on(len(bounds), least, most, clock.passed() - turns_began, began + setting_s - clock.passed(), clock.left()):
            turn = len(bounds)
            try:
                for name, side in turn_order(sides, turn):
                    clock.say(f"{setting.name}: turn {turn + 1} (of {least} to {most}), {name}")
                    side.steps(setting.steps)
                bound = plain.bound()
                local = plain.local_steps(setting.steps) if setting.ranks > 1 and plain_kind.has_local_steps else []
            except OutOfTime:
                if not bounds:
                    raise
                for _, side in sides:
                    del side.measured.turns[turn:]
                break
            bounds.append(bound)
            local_steps += local
            if turn == 0 and clock.limit_s is not None:
                note_memory(setting, sides, clock)
        if not bounds:
            raise OutOfTime
        if clock.limit_s is None:
            note_memory(setting, sides, clock)
        theirs = {kind: peer.finish() for kind, peer in peers.items()}
        exposed = plain.measured.median_s - statistics.median(local_steps) if local_steps else None
        planned = ours.planned() if setting.stage else None
        report.add(setting, recipe.tokens_per_step, ours.finish(), theirs, bounds, exposed, planned)
    finally:
        for peer in peers.values():
            peer.close()
    return report


def micro_benchmarks(binary: Path, clock: Clock) -> str:
    """The rooms' own Google Benchmark binaries, where they are built."""
    rows, texts = [], []
    paths = sorted(binary.parent.glob("tessera_*_bench"))
    for index, path in enumerate(paths):
        clock.say(f"parts: {path.name}, {index + 1} of {len(paths)}")
        try:
            told = output_of([path, "--benchmark_format=json", "--benchmark_min_time=0.1"], clock)
        except OutOfTime:
            if not rows and not texts:
                raise
            texts.append(f"{TIME_WAS_OVER}: without {', '.join(left.name for left in paths[index:])}.")
            break
        if not told.startswith("{"):  # a table of its own, such as bytes a parameter
            texts.append(f"```\n{told.strip()}\n```")
            continue
        for result in json.loads(told)["benchmarks"]:
            counters = ", ".join(f"{key} {value:.3g}" for key, value in result.items() if key not in STANDARD_FIELDS and isinstance(value, float))
            room = path.name.removeprefix("tessera_").removesuffix("_bench")
            rows.append([room, result["name"], f"{result['real_time']:.1f} {result['time_unit']}", counters])
    if not rows and not texts:
        return "no tessera_*_bench is built beside the command"
    return "\n\n".join(["**Parts** (Google Benchmark, one binary per room)", table(["room", "what", "time", "counters"], rows), *texts])


class Results:
    """What has ended so far: printed at once, and in build/bench/ even where the run does not end."""

    def __init__(self, machine: str, out: Path):
        self.machine, self.out = machine, out
        self.sections, self.raw, self.missed, self.left_out = {}, [], [], []
        self.figures, self.steps = [], []  # of settings, for the page
        print(machine, flush=True)

    def add(self, title: str, markdown: str, raw: list = (), missed: list = ()) -> None:
        self.sections[title] = markdown
        self.raw += raw
        self.missed += missed
        print(f"\n### {title}\n{markdown}", flush=True)
        (self.out / "results.md").write_text(self.markdown())
        (self.out / "results.json").write_text(json.dumps({"machine": self.machine, "settings": self.raw}, indent=1))

    def markdown(self) -> str:
        return "\n\n".join([self.machine, *(f"### {title}\n{markdown}" for title, markdown in self.sections.items())]) + "\n"


def run_section(section: plan.Section, options, results: Results, clock: Clock, setting_s: float) -> None:
    out = results.out
    if section.kind == "setting":
        report = measure(section.setting, options.binary, out / section.name.replace(" ", "_"), clock, options.quick, setting_s)
        results.figures += report.figures
        results.steps += report.steps
        results.add(section.name, report.markdown(), report.raw, report.missed)
    elif section.kind == plan.COMMUNICATION:
        report = CommunicationReport()
        report.run(options.binary, options.quick, clock)
        markdown = report.markdown()
        results.add(section.name, markdown, [{"setting": section.name, "times_us": report.times}], report.missed)
    elif section.kind == plan.COMPRESSION:
        results.add(section.name, compression.measure(options.binary, out, steps=2, turns=3, clock=clock))
    elif section.kind == plan.RECOMPUTE:
        markdown, missed = recompute.measure(options.binary, clock)
        results.add(section.name, markdown, missed=missed)
    elif section.kind == plan.CONTEXT:
        markdown, missed = context.measure(options.binary, clock)
        results.add(section.name, markdown, missed=missed)
    elif section.kind in (plan.MIXTURE, plan.OFFLOAD):
        measure_of = mixture.measure if section.kind == plan.MIXTURE else offload.measure
        markdown, missed = measure_of(options.binary, out / section.name, clock)
        results.add(section.name, markdown, missed=missed)
    elif section.kind in (plan.OPTIMIZERS, plan.KERNELS):
        measure_of = optimizers.measure if section.kind == plan.OPTIMIZERS else kernels.measure
        markdown, missed = measure_of(options.binary, clock)
        results.add(section.name, markdown, missed=missed)
    else:
        results.add(section.name, micro_benchmarks(options.binary, clock))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--binary", type=Path, default=ROOT / "build" / "release" / "bin" / "tessera")
    parser.add_argument("--quick", action="store_true", help="at most 3 minutes: the smaller settings and all-reduce, as many turns as there is time for")
    parser.add_argument("--against", type=Path, metavar="BINARY", help="another build of tessera, in place of peers")
    parser.add_argument("--only", help="sections by their name, or by what it contains, with commas between them; and nothing else")
    parser.add_argument("--list", action="store_true", help="print the sections that would run, and end")
    parser.add_argument("--no-parts", action="store_true", help="leave out the rooms' own benchmarks")
    parser.add_argument("--publish", action="store_true", help="put the figures into docs/benchmarks.md, in place of older ones of the same machine")
    parser.add_argument("--strict", action="store_true", help="exit 1 where a goal is missed")
    options = parser.parse_args()
    sections = plan.choose(options.only, options.quick, not options.no_parts)
    if not sections:
        among = f" with --quick; without it there are: {', '.join(plan.names())}" if options.quick else f"; there are: {', '.join(plan.names())}"
        print(f"bench: --only {options.only!r} names no section{among}", file=sys.stderr)
        return 2
    if options.list:
        print("\n".join(section.name for section in sections))
        return 0
    if not options.binary.exists():
        print(f"bench: {options.binary} does not exist; run `make build` first", file=sys.stderr)
        return 2

    clock = Clock(plan.QUICK_S, plan.TAIL_S) if options.quick else Clock()
    out = ROOT / "build" / "bench"
    write_text(out / "text.txt")
    if options.against:
        settings = tuple(setting for setting in QUICK_SETTINGS if (options.only or "") in setting.name)
        print(machine(), against.measure(settings, options.binary, options.against, out / "against", AGAINST_PAIRS, Clock()), sep="\n\n")
        return 0
    results = Results(machine(), out)
    failed = False
    for index, section in enumerate(sections):
        if clock.left() <= 0:
            results.left_out.append(section.name)
            continue
        setting_s = plan.share_of(clock.left(), len(sections) - index) if options.quick else plan.SETTING_S
        clock.say(f"{section.name}: section {index + 1} of {len(sections)}")
        try:
            run_section(section, options, results, clock, setting_s)
        except OutOfTime:
            results.left_out.append(section.name)
        except SideFailed as failure:
            print(f"bench: {section.name}: {failure}", file=sys.stderr)
            failed = True
    if options.publish and not failed:
        publish(ROOT / "docs" / "benchmarks.md", results.machine, results.figures, results.steps, results.sections)
    for name in results.left_out:
        print(f"not measured: {name}: {plan.QUICK_S} s were over; tools/bench --only {name!r} takes its time")
    for miss in results.missed:
        print(f"goal missed: {miss}")
    clock.say(f"done; {out / 'results.md'} and results.json hold the results")
    return 1 if failed or (options.strict and results.missed) else 0


if __name__ == "__main__":
    sys.exit(main())
