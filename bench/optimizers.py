"""Optimizer steps beside others' (bench/peers/optimizers.py), in turn: the least processor time of each side on one thread, a ratio that other load on the machine moves little.

  tools/peer_python bench/optimizers.py [--rounds 5] [NAME ...]

`deepspeed`, which is timed where it is named, is our AdamW beside DeepSpeedCPUAdam (bench/deepspeed_requirements.txt). Its packages and what it compiles lie in build/deepspeed.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NAMES = ["adamw", "lion", "adafactor", "adam8bit", "muon"]
DEEPSPEED = ROOT / "build/deepspeed"


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


def ours(name: str) -> float:
    """Least seconds of a step."""
    done = subprocess.run(
        [ROOT / "build/release/bin/tessera_optim_bench", f"--benchmark_filter=^step/{name}/", "--benchmark_format=json", "--benchmark_repetitions=3", "--benchmark_min_time=0.3"],
        capture_output=True, text=True, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    runs = [run for run in json.loads(done.stdout)["benchmarks"] if run["run_type"] == "iteration"]
    return min(run["cpu_time"] for run in runs) / 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("names", nargs="*", default=NAMES)
    options = parser.parse_args()
    print(f"{'optimizer':<10} {'ours, ms':>9} {'theirs, ms':>10} {'theirs / ours':>14}")
    for name in options.names or NAMES:
        peer = subprocess.Popen(
            [sys.executable, ROOT / "bench/peers/optimizers.py", name],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=surroundings(name),
        )  # fmt: skip

        def theirs(steps: int) -> float:
            peer.stdin.write(f"step {steps}\n")
            peer.stdin.flush()
            answer = next(line for line in peer.stdout if line.startswith("{"))  # DeepSpeed says there what it does
            return min(json.loads(answer)["step_s"])

        theirs(2)  # its state, and memory that is touched for the first time
        times = [(ours("adamw" if name == "deepspeed" else name), theirs(10)) for _ in range(options.rounds)]
        peer.communicate("quit\n")
        own, other = (min(side) for side in zip(*times))
        print(f"{name:<10} {own * 1e3:9.1f} {other * 1e3:10.1f} {other / own:14.2f}", flush=True)


if __name__ == "__main__":
    main()
