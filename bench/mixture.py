"""One mixture-of-experts layer on our side and in Hugging Face's Mixtral: processor time of forward and backward on one thread."""

import json
from pathlib import Path

from report import milliseconds, table
from sides import ROOT, Clock, OutOfTime, output_of

GOAL = 1.5  # times the speed of transformers' own loop over experts


def measure(binary: Path, clock: Clock) -> tuple[str, list[str]]:
    """The section as markdown, and the goals that were missed."""
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
            if experts == "eager" and found["ratio"] < GOAL:
                missed.append(f"mixture {compute}: {found['ratio']:.2f} times transformers' speed, goal {GOAL}")
    text = (
        "**Mixture of experts**: forward and backward of one layer (1,024 tokens, width 512, eight experts of 1,024, two for a token) on one thread, in turns "
        "with transformers' Mixtral and with the layer's matrix products alone; processor time."
    )
    return f"{text}\n\n{table(['type', 'their experts', 'tessera, ms', 'theirs', 'ratio', 'products', 'share of the bound'], rows)}", missed
