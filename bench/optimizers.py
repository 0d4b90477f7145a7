"""Optimizer steps beside others' (bench/peers/optimizers.py), in turn: the least processor time of each side on one thread, a ratio that other load on the machine moves little.

  tools/peer_python bench/optimizers.py [--rounds 5] [NAME ...]

`adamw clip` multiplies gradients by a factor, `masters` are bf16 weights and gradients with fp32 masters: in one pass here, in passes of their own there. `deepspeed` is our AdamW beside
DeepSpeedCPUAdam (bench/deepspeed_requirements.txt), whose packages and what it compiles lie in build/deepspeed.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

from report import against_goal, table
from sides import ROOT, Clock, OutOfTime
from spread import MISSED, Spread, verdict

# Name: (binary and benchmark of ours, least ratio that is the goal)
SIDES = {
    "adamw": ("optim", "adamw", 0.95),
    "adamw clip": ("optim", "adamw_clip", 0.95),
    "deepspeed": ("optim", "adamw", 0.95),
    "masters": ("precision", "masters", 1.2),
    "masters clip": ("precision", "masters_clip", 1.2),
    "lion": ("optim", "lion", None),
    "adafactor": ("optim", "adafactor", None),
    "adam8bit": ("optim", "adam8bit", None),
    "muon": ("optim", "muon", None),
}
HELD = [name for name, (_, _, goal) in SIDES.items() if goal]
DEEPSPEED = ROOT / "build/deepspeed"
ROUNDS = 5


def surroundings(name: str) -> dict[str, str]:
    """In which a peer finds its packages."""
    if name != "deepspeed":
        return dict(os.environ)
    packages = DEEPSPEED / "packages"
    if not (packages / "deepspeed").exists():
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", packages, "-r", ROOT / "bench/deepspeed_requirements.txt"]
        subprocess.run([str(part) for part in pip], check=True)
    return os.environ | {
        "PYTHONPATH": str(packages), "PATH": f"{packages / 'bin'}:{os.environ['PATH']}", "TORCH_EXTENSIONS_DIR": str(DEEPSPEED / "extensions"), "DS_ACCELERATOR": "cpu",
    }  # fmt: skip


def ours(folder: Path, name: str) -> float:
    """Least seconds of a step."""
    room, benchmark, _ = SIDES[name]
    done = subprocess.run(
        [folder / f"tessera_{room}_bench", f"--benchmark_filter=^step/{benchmark}/", "--benchmark_format=json", "--benchmark_repetitions=3", "--benchmark_min_time=0.3"],
        capture_output=True, text=True, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    runs = [run for run in json.loads(done.stdout)["benchmarks"] if run["run_type"] == "iteration"]
    return min(run["cpu_time"] for run in runs) / 1e3


def turns(folder: Path, name: str, rounds: int) -> list[tuple[float, float]]:
    """Seconds of ours and of theirs, turn by turn. Throws where a side cannot be had."""
    peer = subprocess.Popen(
        [sys.executable, ROOT / "bench/peers/optimizers.py", name.replace(" ", "_")],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=surroundings(name),
    )  # fmt: skip

    def theirs(steps: int) -> float:
        peer.stdin.write(f"step {steps}\n")
        peer.stdin.flush()
        answer = next((line for line in peer.stdout if line.startswith("{")), None)  # DeepSpeed says there what it does
        if answer is None:
            raise OSError(f"the peer of {name} has ended")
        return min(json.loads(answer)["step_s"])

    try:
        theirs(2)  # its state, and memory that is touched for the first time
        return [(ours(folder, name), theirs(10)) for _ in range(rounds)]
    finally:
        peer.kill()
        peer.communicate()


def row(name: str, times: list[tuple[float, float]]) -> tuple[list[str], Spread]:
    own, other = (min(side) for side in zip(*times))
    ratios = Spread.of([there / here for here, there in times])
    return [name, f"{own * 1e3:.1f}", f"{other * 1e3:.1f}", f"{other / own:.2f}", against_goal(ratios, SIDES[name][2])], ratios


HEADER = ["optimizer", "ours, ms", "theirs, ms", "theirs / ours", "turn by turn"]


def measure(binary: Path, clock: Clock) -> tuple[str, list[str]]:
    """The section of `make bench` as markdown, and the goals that were missed."""
    rows, missed, without = [], [], []
    for name in HELD:
        try:
            clock.timeout()
            clock.say(f"optimizers: {name}")
            times = turns(binary.parent, name, ROUNDS)
        except OutOfTime:
            if not rows:
                raise
            break
        except (OSError, subprocess.CalledProcessError) as error:
            without.append(f"{name} is not measured: {error}")
            continue
        cells, ratios = row(name, times)
        rows.append(cells)
        if verdict(ratios, SIDES[name][2]) == MISSED:
            missed.append(f"optimizer {name}: {ratios} of the peer's speed, goal {SIDES[name][2]}")
    text = (
        "**Optimizer steps** on the parameters of a LLaMA of 35 million, on one thread (least processor time of both sides, in turns), beside PyTorch's fused AdamW, alone, behind a multiplication of "
        "the gradients, and on fp32 masters between casts of bf16 gradients and weights; and beside DeepSpeedCPUAdam."
    )
    return "\n\n".join([text, table(HEADER, rows), *without]), missed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("names", nargs="*", default=[name for name in SIDES if name != "deepspeed"])
    options = parser.parse_args()
    rows = [row(name, turns(ROOT / "build/release/bin", name, options.rounds))[0] for name in options.names]
    print(table(HEADER, rows))


if __name__ == "__main__":
    main()
