"""Fused kernels beside their eager compositions, forward and backward, in turns within one run: ratios of the least processor times, which other load on the machine moves little,
and the share of the memory bandwidth that was measured in the same run.

  tools/python bench/kernels.py [--filter REGEX] [--repetitions 5] [--threads 1]
"""

import argparse
import json
import os
import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# kernel: (least ratio, least share of the bandwidth where the problem does not fit into caches)
GOALS = {"rms_norm": (3, 0.7), "rope": (3, 0.7), "swiglu": (1.6, 0.7), "fused": (1.5, None), "adamw": (0.95, 0.8), "adamw_copy": (1.2, None)}


def measure(pattern: str, repetitions: int, threads: int) -> dict[str, tuple[float, float]]:
    """Benchmark: least seconds of an iteration, and the bytes that it has to move at least."""
    done = subprocess.run(
        [ROOT / "build/release/bin/tessera_kernels_bench", f"--benchmark_filter={pattern}|^bandwidth/", "--benchmark_format=json", "--benchmark_min_time=0.03",
         "--benchmark_enable_random_interleaving=true", f"--benchmark_repetitions={repetitions}"],
        capture_output=True, text=True, check=True, env=os.environ | {"OMP_NUM_THREADS": str(threads)},
    )  # fmt: skip
    found: dict[str, tuple[float, float]] = {}
    scale = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3}
    for run in json.loads(done.stdout)["benchmarks"]:
        if run["run_type"] != "iteration":
            continue
        # Of one thread processor time, of several what the clock says.
        seconds = run["cpu_time" if threads == 1 else "real_time"] * scale[run["time_unit"]]
        before = found.get(run["run_name"], (float("inf"), 0.0))
        found[run["run_name"]] = (min(before[0], seconds), run.get("bytes", 0.0))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--filter", default="_(fused|eager)/|^(fused|eager)/.*chunk:0/")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    found = measure(options.filter, options.repetitions, options.threads)
    bandwidth = {place: found[f"bandwidth/in_place:{place}/real_time"] for place in (0, 1)}
    bandwidth = {place: moved / seconds for place, (seconds, moved) in bandwidth.items()}
    print(f"{options.threads} thread(s): {bandwidth[0] / 1e9:.1f} GB/s from one place to another, {bandwidth[1] / 1e9:.1f} in place (AdamW, embedding gradients);")
    print("a share above 1 is of what lies in caches")
    print(f"{'kernel':<62} {'us':>10} {'eager / ours':>13} {'goal':>6} {'bandwidth':>10} {'goal':>6}")
    for name in sorted(found):
        kernel = re.sub(r"_?fused$", "", name.split("/")[0])
        other = found.get(name.replace("fused", "eager", 1))
        if "fused" not in name.split("/")[0] or other is None:
            continue
        seconds, moved = found[name]
        share = moved / seconds / bandwidth[kernel.startswith(("adamw", "embedding"))]
        ratio_goal, share_goal = GOALS.get(kernel or "fused", (None, None))
        print(f"{name.removesuffix('/real_time'):<62} {seconds * 1e6:10.1f} {other[0] / seconds:13.2f} {ratio_goal or '':>6} {share:10.2f} {share_goal or '':>6}")


if __name__ == "__main__":
    main()
