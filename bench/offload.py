"""One model through each placement of `[offload]`: seconds of a step beside a step that moves nothing, in turns, and its bytes on both sides. And how the price
falls as a step computes more for the same bytes that move (docs/memory.md).

  tools/bench --only offload
  tools/peer_python bench/offload.py --draw docs/pictures/offload-batch.svg     that curve alone, as a picture too
"""

import argparse
import json
import statistics
from pathlib import Path

from report import mebibytes, table
from sides import ROOT, Clock, OutOfTime, Tessera
from spread import Spread, pair_ratios, turn_order

RECIPE = ROOT / "recipes" / "bench_vocab.toml"
WARMUP, STEPS, TURNS = 2, 3, 3
# 41 million parameters; two micro-batches of 2 x 256 tokens.
MODEL = ["model.dim=512", "model.layers=12", "model.heads=8", "model.kv_heads=8", "model.ffn_dim=1376", "model.vocab_size=2560", "batch.global_size=4", "batch.micro_size=2"]


def slices(place: str) -> list[str]:
    return ["zero.stage=3", *(f"offload.{what}={place}" for what in ("params", "gradients", "optimizer"))]


def layer_by_layer(place: str, layers: int) -> list[str]:
    return [f"pipeline.virtual_stages={layers + 2}", "pipeline.schedule=breadth_first", "recompute.mode=full", *slices(place)]


PLACEMENTS = {
    "nothing": [],
    "`recompute.mode = full`": ["recompute.mode=full"],
    "`offload.activations = host`": ["offload.activations=host"],
    "`offload.activations = disk`": ["offload.activations=disk"],
    "`offload.optimizer = host`": ["offload.optimizer=host"],
    "the same with `delayed_update = true`": ["offload.optimizer=host", "offload.delayed_update=true"],
    "`offload.optimizer = disk`": ["offload.optimizer=disk"],
    "`offload.gradients = host`, `offload.optimizer = host`": ["offload.gradients=host", "offload.optimizer=host"],
    "`offload.optimizer = host`, `update = device`": ["offload.optimizer=host", "offload.update=device"],
    "stage 3 with all its slices on the host": slices("host"),
    "stage 3 with all its slices on disk": slices("disk"),
    "layer by layer, from the host": layer_by_layer("host", 12),
    "layer by layer, from disk": layer_by_layer("disk", 12),
}

# 7 million parameters; a step of so many micro-batches of one sequence.
SMALL = ["model.dim=384", "model.layers=4", "model.heads=6", "model.kv_heads=6", "model.ffn_dim=1024", "model.vocab_size=512", "data.seq_len=128", "batch.micro_size=1"]
BATCHES = (1, 2, 4, 8, 16, 32, 64)
WAYS = {
    "nothing": [],
    "recompute": ["recompute.mode=full"],
    "optimizer on the host": ["offload.optimizer=host"],
    "optimizer on disk": ["offload.optimizer=disk"],
    "slices on the host": ["recompute.mode=full", *slices("host")],
    "layer by layer, host": layer_by_layer("host", 4),
    "layer by layer, disk": layer_by_layer("disk", 4),
}


def in_turns(binary: Path, settings: dict[str, list[str]], scratch: Path, clock: Clock, turns: int, steps: int, say: str) -> dict[str, Tessera]:
    """The sides, each with what whole turns have shown."""
    sides = {name: Tessera(binary, RECIPE, sets, 1, scratch / str(i), clock, WARMUP) for i, (name, sets) in enumerate(settings.items())}
    for turn in range(turns):
        clock.say(f"{say}, turn {turn + 1} of {turns}")
        try:
            for _, side in turn_order(list(sides.items()), turn):
                side.steps(steps)
        except OutOfTime:
            if turn == 0:
                raise
            for side in sides.values():
                del side.measured.turns[turn:]
            break
    return sides


def times_longer(side: Tessera, plain: Tessera) -> list[float]:
    return pair_ratios(plain.measured.turns, side.measured.turns)


def last_line(side: Tessera) -> dict:
    return json.loads((side.log_dir / "metrics.jsonl").read_text().splitlines()[-1])


def measure_placements(binary: Path, scratch: Path, clock: Clock) -> str:
    sides = in_turns(binary, {name: [*MODEL, *sets] for name, sets in PLACEMENTS.items()}, scratch, clock, TURNS, STEPS, "offload: placements")
    rows = []
    for name, side in sides.items():
        host = sum(last_line(side).get("host_by_category", {}).values())
        times = "" if side is sides["nothing"] else str(Spread.of(times_longer(side, sides["nothing"])))
        rows.append([name, mebibytes(side.measured.peak_bytes), mebibytes(host), f"{side.measured.median_s:.2f}", times])
    text = (
        "**One model through each placement**: LLaMA of 41 M parameters, fp32, AdamW, two micro-batches of 2 x 256 tokens a step, one rank: peak in MiB by the tracker, median seconds "
        "of a step, and how many times as long as one that moves nothing (median, least and most of the turns)."
    )
    return f"{text}\n\n{table(['', 'device', 'host', 'step, s', 'times'], rows)}"


def measure_batches(binary: Path, scratch: Path, clock: Clock) -> dict[str, list[float]]:
    """By way: for each of BATCHES how many times as long as a step that moves nothing."""
    found = {name: [] for name in WAYS if name != "nothing"}
    for batch in BATCHES:
        settings = {name: [*SMALL, f"batch.global_size={batch}", *sets] for name, sets in WAYS.items()}
        turns, steps = (3, max(2, 16 // batch)) if batch <= 16 else (2, 2)
        sides = in_turns(binary, settings, scratch / f"batch{batch}", clock, turns, steps, f"offload: {batch} sequences a step")
        for name, ratios in found.items():
            ratios.append(statistics.median(times_longer(sides[name], sides["nothing"])))
    return found


def batches_table(found: dict[str, list[float]]) -> str:
    rows = [[name, *(f"{ratio:.2f}" for ratio in ratios)] for name, ratios in found.items()]
    text = (
        "**As a step grows**: LLaMA of 7 M parameters, fp32, micro-batches of one sequence of 128 tokens: how many times as long as a step that moves nothing, by sequences a step. Layer "
        "by layer, slices on the host and recomputation compute everything twice but the head."
    )
    return f"{text}\n\n{table(['', *map(str, BATCHES)], rows)}"


def draw(found: dict[str, list[float]], file: Path) -> None:
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "offload"})
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 4.2), layout="constrained")
    for (name, ratios), marker in zip(found.items(), "osv^Dx"):
        axes.plot(BATCHES, ratios, marker=marker, label=name)
    axes.axhline(1, color="grey", linewidth=0.8)
    axes.set_xscale("log", base=2)
    axes.set_xticks(BATCHES, [str(batch) for batch in BATCHES])
    axes.set_yscale("log")
    axes.set_yticks([1, 1.5, 2, 3, 5, 10, 20], ["1", "1.5", "2", "3", "5", "10", "20"])
    axes.minorticks_off()
    axes.set_ylim(min(0.9, *map(min, found.values())) * 0.97, max(map(max, found.values())) * 1.1)
    axes.set(xlabel="sequences a step", ylabel="times a step that moves nothing")
    figure.legend(loc="outside right center")
    figure.savefig(file, metadata={"Date": None})


def measure(binary: Path, scratch: Path, clock: Clock) -> tuple[str, list[str]]:
    """The section as markdown; there are no goals."""
    placements = measure_placements(binary, scratch, clock)
    try:
        return f"{placements}\n\n{batches_table(measure_batches(binary, scratch, clock))}", []
    except OutOfTime:
        return placements, []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--binary", type=Path, default=ROOT / "build" / "release" / "bin" / "tessera")
    parser.add_argument("--draw", type=Path, required=True, metavar="FILE.svg")
    options = parser.parse_args()
    from run import write_text

    write_text(ROOT / "build" / "bench" / "text.txt")
    found = measure_batches(options.binary, ROOT / "build" / "bench" / "offload", Clock())
    print(batches_table(found))
    draw(found, options.draw)


if __name__ == "__main__":
    main()
