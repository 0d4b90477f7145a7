"""What gradient compression saves and costs: bytes and time per step of data-parallel training, for each comm.compression, in turns."""

import json
from pathlib import Path

from report import mebibytes, milliseconds, table
from sides import ROOT, Clock, OutOfTime, Tessera, output_of
from spread import turn_order

KINDS = ("none", "bf16", "fp16", "powersgd")
RECIPE = ROOT / "recipes" / "bench_vocab.toml"
RANKS = 2


def settings(kind: str) -> list[str]:
    """Compressed from the first step on: a warm-up of plain steps would be measured instead."""
    return [f"comm.compression={kind}"] + (["comm.powersgd_start=0"] if kind == "powersgd" else [])


def sent_bytes(binary: Path, kind: str, clock: Clock) -> int:
    """What a rank sends in a step, from a dry run of that step."""
    flags = [flag for setting in settings(kind) for flag in ("--set", setting)]
    command = [str(binary), "plan", str(RECIPE), "--world", str(RANKS), "--json", *flags]
    return sum(entry["sent_bytes"] for entry in json.loads(output_of(command, clock))["ranks"][0]["collectives"])


def measure(binary: Path, scratch: Path, steps: int, turns: int, clock: Clock) -> str:
    """The section as markdown."""
    sides = {kind: Tessera(binary, RECIPE, settings(kind), RANKS, scratch / f"compression_{kind}", clock) for kind in KINDS}
    sent = {kind: sent_bytes(binary, kind, clock) for kind in KINDS}
    for turn in range(turns):
        try:
            for kind in turn_order(KINDS, turn):
                clock.say(f"compression: turn {turn + 1} of {turns}, {kind}")
                sides[kind].steps(steps)
        except OutOfTime:
            if not turn:
                raise
            for side in sides.values():
                del side.measured.turns[turn:]
            break
    rows = []
    for kind, side in sides.items():
        measured = side.finish()
        rows.append([kind, mebibytes(sent[kind]), milliseconds(measured.median_s), milliseconds(measured.exposed_comm_s)])
    return "\n\n".join(
        [
            f"**Gradient compression** (`comm.compression`): vocab fp32 on {RANKS} ranks. Sent by a rank in a step, as its dry run counts it; step and exposed "
            "communication as measured. Inside one host bytes are cheap, so this shows the cost; between hosts the bytes count.",
            table(["compression", "sent, MiB", "step, ms", "exposed, ms"], rows),
        ]
    )
