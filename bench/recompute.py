"""What recomputing every block costs and saves, on our side and on the peer's: processor time of forward and backward on one thread, and bytes."""

import json
from pathlib import Path

from report import mebibytes, milliseconds, table
from sides import ROOT, Clock, OutOfTime, output_of

RECIPE = ROOT / "recipes" / "bench_matmul.toml"
GOAL_POINTS = 5  # time may rise by the share of recomputed FLOPs and this much


def measure(binary: Path, clock: Clock) -> tuple[str, list[str]]:
    """The section as markdown, and the goals that were missed."""
    rows, missed = [], []
    for compute in ("fp32", "bf16"):
        try:
            clock.say(f"recomputation: {compute}, tessera")
            answer = output_of([binary.parent / "tessera_train_bench", f"--benchmark_filter=/{compute}_full/", "--benchmark_format=json"], clock)
            (ours,) = json.loads(answer)["benchmarks"]
            clock.say(f"recomputation: {compute}, torch.utils.checkpoint")
            answer = output_of([ROOT / "tools" / "peer_python", ROOT / "bench" / "peers" / "recompute.py", RECIPE, "--compute", compute], clock)
        except OutOfTime:
            if not rows:
                raise
            break
        peer = json.loads(answer.splitlines()[-1])
        seconds = ours["quickest_ms"] / 1000
        rows.append(
            [compute, milliseconds(seconds), milliseconds(peer["recompute_s"]), f"{peer['recompute_s'] / seconds:.2f}", f"{100 * ours['time_more']:+.1f}%",
             f"{100 * ours['flops_more']:+.1f}%", f"{100 * peer['time_more']:+.1f}%", f"{ours['kept_less']:.1f}x",
             f"{ours['peak_MiB']:.0f}", mebibytes(peer["peak_bytes"]["recompute"])]
        )  # fmt: skip
        if ours["points"] > GOAL_POINTS:
            missed.append(f"recompute {compute}: {ours['points']:.1f} points more time than FLOPs, goal {GOAL_POINTS}")
    text = (
        "**Recompute** of every block: forward and backward of two sequences, on one thread (processor time of the quickest pass, in turns with passes without "
        "recompute), beside torch.utils.checkpoint; what time and FLOPs rise by; bytes of activations between the passes; peak in MiB beyond parameters and "
        "gradients."
    )
    header = ["type", "tessera, ms", "peer's", "ratio", "time", "FLOPs", "peer's time", "kept, less", "peak, MiB", "peer's"]
    return f"{text}\n\n{table(header, rows)}", missed
