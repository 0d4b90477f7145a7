"""One mixture-of-experts layer on our side and in Hugging Face's Mixtral: processor time of forward and backward on one thread. And experts dealt over two
ranks, beside every expert on both."""

import json
import statistics
from pathlib import Path

from report import milliseconds, table
from sides import ROOT, Clock, OutOfTime, Tessera, output_of

GOAL = 1.5  # times the speed of either of transformers' ways
GOAL_DEALT, TURNS, STEPS = 0.9, 5, 8
DEALT = [
    "mesh.dp_replicate=1", "mesh.dp_shard=2", "zero.stage=1", "model.dim=256", "model.layers=4", "model.ffn_dim=344", "data.seq_len=256", "batch.global_size=16",
    "batch.micro_size=8", "model.router=expert_choice", "moe.balance_loss=0", "run.threads=1",
]  # fmt: skip


def measure(binary: Path, scratch: Path, clock: Clock) -> tuple[str, list[str]]:
    """The section as markdown, and the goals that were missed."""
    layer, missed = measure_layer(binary, clock)
    try:
        dealt, more = measure_dealt(binary, scratch, clock)
    except OutOfTime:
        return layer, missed
    return f"{layer}\n\n{dealt}", missed + more


def measure_dealt(binary: Path, scratch: Path, clock: Clock) -> tuple[str, list[str]]:
    """Two ranks on the same tokens, `mesh.ep = 2` and 1 in turns: their steps' ratio, and how uneven experts were loaded: not at all, for they choose."""
    sides = {}
    for ep in (1, 2):
        sides[ep] = Tessera(binary, ROOT / "recipes" / "mixtral_ep2_dp2.toml", [*DEALT, f"mesh.ep={ep}"], 2, scratch / f"ep{ep}", clock)
    ratios, loads = [], []
    for turn in range(TURNS):
        clock.say(f"mixture: experts over two ranks, turn {turn + 1} of {TURNS}")
        for side in sides.values():
            side.steps(STEPS)
        ratios.append(statistics.median(sides[1].measured.turns[-1]) / statistics.median(sides[2].measured.turns[-1]))
        lines = (sides[2].log_dir / "metrics.jsonl").read_text().splitlines()[sides[2].warmup :]
        loads += [json.loads(line)["busiest_expert"] for line in lines]
    ratio = statistics.median(ratios)
    text = (
        f"**Experts over two ranks**: training steps (stage 1, eight experts of 344 that choose their tokens, width 256, 2,048 tokens a rank and step, a thread a "
        f"rank), `mesh.ep = 2` beside every expert on both, in turns: {ratio:.2f} times as fast ({min(ratios):.2f} to {max(ratios):.2f} of {TURNS} turns), the busiest expert at "
        f"{statistics.mean(loads):.1f} times the mean."
    )
    return text, [f"experts over two ranks: {ratio:.2f} of the rate of two data ranks, goal {GOAL_DEALT}"] if ratio < GOAL_DEALT else []


def measure_layer(binary: Path, clock: Clock) -> tuple[str, list[str]]:
    rows, missed = [], []
    for compute in ("fp32", "bf16"):
        for experts in ("eager", "grouped_mm"):
            try:
                clock.say(f"mixture: {compute}, transformers {experts}")
                answer = output_of(
                    [ROOT / "tools" / "peer_python", ROOT / "bench" / "peers" / "mixture.py", binary.parent / "tessera_mixture_side", "--compute", compute,
                     "--experts", experts], clock)  # fmt: skip
            except OutOfTime:
                if not rows:
                    raise
                break
            found = json.loads(answer.splitlines()[-1])
            rows.append(
                [compute, experts, milliseconds(found["ours_s"]), milliseconds(found["theirs_s"]), f"{found['ratio']:.2f}", milliseconds(found["products_s"]),
                 f"{100 * found['share_of_bound']:.0f}%"]
            )  # fmt: skip
            if found["ratio"] < GOAL:
                missed.append(f"mixture {compute}: {found['ratio']:.2f} times the speed of transformers' {experts}, goal {GOAL}")
    text = (
        "**Mixture of experts**: forward and backward of one layer (1,024 tokens, new in each turn, width 512, eight experts of 1,024, two for a token) on one thread, in turns "
        "with transformers' Mixtral and with the layer's matrix products alone; processor time."
    )
    return f"{text}\n\n{table(['type', 'their experts', 'tessera, ms', 'theirs', 'ratio', 'products', 'share of the bound'], rows)}", missed
