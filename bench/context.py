"""Attention over two ranks on our side, and in plain PyTorch: keys and values all-gathered over Gloo, then its own attention."""

import json
from pathlib import Path

from report import milliseconds, table
from sides import ROOT, Clock, OutOfTime, output_of

LENGTH, RANKS, HEADS, TURNS = 8192, 2, 2, 3
GOAL_OVER_PEER, GOAL_OVER_ONE = 1.5, 0.85  # of the ring


def measure(binary: Path, clock: Clock) -> tuple[str, list[str]]:
    """The section as markdown, and the goals that were missed."""
    sizes = ["--length", str(LENGTH), "--heads", str(HEADS), "--kv-heads", str(HEADS)]
    ours, peer, shown = {}, float("inf"), []
    for turn in range(TURNS):
        try:
            clock.say(f"context: turn {turn + 1} of {TURNS}, tessera")
            lines = output_of([binary, "bench", "cp", *sizes, "--nproc", str(RANKS), "--iterations", "2", "--backend", "shm", "--json"], clock).splitlines()
            clock.say(f"context: turn {turn + 1} of {TURNS}, PyTorch")
            command = [ROOT / "tools" / "peer_python", ROOT / "bench" / "peers" / "ring_attention.py", *sizes, "--ranks", str(RANKS), "--rounds", "2"]
            peer = min(peer, json.loads(output_of(command, clock).splitlines()[-1])["time_ms"] / 1e3)
        except OutOfTime:
            if not ours:
                raise
            break
        shown = [json.loads(line) for line in lines]
        for row in shown:
            if row["kind"] == "attention":
                known = ours.setdefault(row["method"], {"us": row["time_us"], "one_us": row["one_us"], "sent": row["sent_bytes"]})
                known["us"], known["one_us"] = min(known["us"], row["time_us"]), min(known["one_us"], row["one_us"])
    one_us = min(known["one_us"] for known in ours.values())
    rows, missed = [], []
    for method, known in ours.items():
        over_one, over_peer = one_us / (RANKS * known["us"]), peer / (known["us"] / 1e6)
        rows.append([method, milliseconds(known["us"] / 1e6), f"{over_one:.2f}", f"{over_peer:.2f}", f"{known['sent'] / 2**20:.1f}"])
        if method == "ring" and over_peer < GOAL_OVER_PEER:
            missed.append(f"context: the ring at {over_peer:.2f} times the peer's speed, goal {GOAL_OVER_PEER}")
        if method == "ring" and over_one < GOAL_OVER_ONE:
            missed.append(f"context: a rank of the ring at {over_one:.2f} of one device's rate, goal {GOAL_OVER_ONE}")
    share = [[str(row["length"]), f"{100 * row['fused']:.1f}%", f"{100 * row['unfused']:.1f}%"] for row in shown if row["kind"] == "memory"]
    text = (
        f"**Attention over {RANKS} ranks**: forward and backward of one causal core, {LENGTH} positions, {HEADS} heads of 64, fp32, a thread a rank, in turns; a "
        f"rank's rate over one device's ({milliseconds(one_us / 1e6)} ms), and speed over plain PyTorch's ({milliseconds(peer)} ms), which computes what the mask hides, too."
    )
    return "\n\n".join([
        text, table(["method", "ms", "rate over one device's", "over PyTorch", "sent by a rank, MiB"], rows),
        "Attention's share of what a block of LLaMA keeps for backward, fused and with all scores held:", table(["length", "fused", "all scores"], share)
    ]), missed  # fmt: skip
