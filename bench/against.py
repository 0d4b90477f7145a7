"""Two builds of tessera in turns: what a change of the code did to a step."""

from pathlib import Path

from comparisons import Setting
from report import table
from sides import ROOT, Clock, Tessera
from spread import Spread, pair_ratios, turn_order


def measure(settings: tuple[Setting, ...], binary: Path, other: Path, scratch: Path, turns: int, clock: Clock) -> str:
    """Of each setting, steps of both in so many pairs of turns, and the other's time over this one's: above 1 this one is faster."""
    from recipe import read_recipe  # brings torch, which nothing else here needs

    rows = []
    for setting in settings:
        recipe = setting.recipe(ROOT)
        keys = setting.our_settings(read_recipe(recipe).global_size)
        this, that = (Tessera(file, recipe, keys, setting.ranks, scratch / name, clock) for name, file in (("this", binary), ("other", other)))
        for turn in range(turns):
            for side in turn_order([this, that], turn):
                clock.say(f"{setting.name}: pair {turn + 1} of {turns}, {side.command[0]}")
                side.steps(2 * setting.steps)
        speed = Spread.of(pair_ratios(this.measured.turns, that.measured.turns))
        rows.append([setting.name, f"{this.measured.median_s:.3f} s", f"{that.measured.median_s:.3f} s", f"{speed.median:.3f} [{speed.least:.3f}, {speed.most:.3f}]",
                     f"{this.measured.peak_bytes / that.measured.peak_bytes:.3f}"])  # fmt: skip
    return table(["setting", "a step of this", "of the other", "speed over the other's", "memory over the other's"], rows)
