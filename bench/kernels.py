"""Fused kernels beside their eager compositions, forward and backward, in turns within one run: ratios of the least processor times, which other load on the machine moves little,
and the share of the memory bandwidth that was measured in the same run.

  tools/python bench/kernels.py [--filter REGEX] [--repetitions 5] [--threads 1]
"""

import argparse
import json
import os
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

from report import table
from sides import ROOT, Clock

# kernel: (least ratio, least share of the bandwidth where the problem does not fit into caches)
GOALS = {"rms_norm": (3, 0.7), "rope": (3, 0.7), "swiglu": (1.6, 0.7), "fused": (1.5, None), "adamw": (0.95, 0.8), "adamw_copy": (1.2, None)}
EVERY = "_(fused|eager)/|^(fused|eager)/.*chunk:0/"
CACHES = 64 << 20  # bytes: a problem of more is in memory


def run(folder: Path, pattern: str, repetitions: int, threads: int) -> dict[str, tuple[float, float]]:
    """Benchmark: least seconds of an iteration, and the bytes that it has to move at least."""
    done = subprocess.run(
        [folder / "tessera_kernels_bench", f"--benchmark_filter={pattern}|^bandwidth/", "--benchmark_format=json", "--benchmark_min_time=0.03",
         "--benchmark_enable_random_interleaving=true", f"--benchmark_repetitions={repetitions}"],
        capture_output=True, text=True, check=True, env=os.environ | {"OMP_NUM_THREADS": str(threads)},
    )  # fmt: skip
    found: dict[str, tuple[float, float]] = {}
    scale = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3}
    for result in json.loads(done.stdout)["benchmarks"]:
        if result["run_type"] != "iteration":
            continue
        # Of one thread processor time, of several what the clock says.
        seconds = result["cpu_time" if threads == 1 else "real_time"] * scale[result["time_unit"]]
        before = found.get(result["run_name"], (float("inf"), 0.0))
        found[result["run_name"]] = (min(before[0], seconds), result.get("bytes", 0.0))
    return found


@dataclass(frozen=True)
class Compared:
    name: str
    kernel: str
    seconds: float
    moved: float  # bytes
    ratio: float  # eager / ours
    share: float  # of the bandwidth

    @property
    def goals(self) -> tuple[float | None, float | None]:
        ratio, share = GOALS.get(self.kernel or "fused", (None, None))
        return ratio, share if self.moved > CACHES else None

    def missed(self) -> list[str]:
        ratio, share = self.goals
        found = [f"kernel {self.name}: {self.ratio:.2f} times its composition, goal {ratio}"] if ratio and self.ratio < ratio else []
        return found + ([f"kernel {self.name}: {self.share:.2f} of the bandwidth, goal {share}"] if share and self.share < share else [])


def compare(found: dict[str, tuple[float, float]]) -> tuple[str, list[Compared]]:
    """What the bandwidth is, and each kernel beside its composition."""
    bandwidth = {place: found[f"bandwidth/in_place:{place}/real_time"] for place in (0, 1)}
    bandwidth = {place: moved / seconds for place, (seconds, moved) in bandwidth.items()}
    text = f"{bandwidth[0] / 1e9:.1f} GB/s from one place to another, {bandwidth[1] / 1e9:.1f} in place (AdamW, embedding gradients); a share above 1 is of what lies in caches"
    rows = []
    for name in sorted(found):
        kernel = re.sub(r"_?fused$", "", name.split("/")[0])
        other = found.get(name.replace("fused", "eager", 1))
        if "fused" not in name.split("/")[0] or other is None:
            continue
        seconds, moved = found[name]
        share = moved / seconds / bandwidth[kernel.startswith(("adamw", "embedding"))]
        rows.append(Compared(name.removesuffix("/real_time"), kernel, seconds, moved, other[0] / seconds, share))
    return text, rows


def as_table(rows: list[Compared]) -> str:
    cells = [[row.name, f"{row.seconds * 1e6:.1f}", f"{row.ratio:.2f}", str(row.goals[0] or ""), f"{row.share:.2f}", str(row.goals[1] or "")] for row in rows]
    return table(["kernel", "us", "eager / ours", "goal", "bandwidth", "goal"], cells)


def measure(binary: Path, clock: Clock) -> tuple[str, list[str]]:
    """The section of `make bench` as markdown, and the goals that were missed."""
    clock.timeout()
    clock.say("kernels: each beside its composition")
    text, rows = compare(run(binary.parent, EVERY, 3, 1))
    intro = "**Fused kernels** beside their eager compositions, forward and backward, on one thread (least processor time, interleaved)"
    return f"{intro}; {text}.\n\n{as_table(rows)}", [miss for row in rows for miss in row.missed()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--filter", default=EVERY)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    text, rows = compare(run(ROOT / "build/release/bin", options.filter, options.repetitions, options.threads))
    print(f"{options.threads} thread(s): {text}\n{as_table(rows)}")


if __name__ == "__main__":
    main()
