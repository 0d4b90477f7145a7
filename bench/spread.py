"""What a few noisy numbers say: least, median and most, and whether a goal is kept, missed or left open by them. No clock, no process."""

import statistics
from dataclasses import dataclass


@dataclass(frozen=True)
class Spread:
    """Of the pairs of turns: each value compares a turn of ours with the peer's beside it."""

    least: float
    median: float
    most: float
    count: int

    @staticmethod
    def of(values: list[float]) -> "Spread":
        return Spread(min(values), statistics.median(values), max(values), len(values))

    def __str__(self) -> str:
        return f"{number(self.median)}" + (f" [{number(self.least)}, {number(self.most)}]" if self.count > 1 else "")


KEPT, OPEN, MISSED = "yes", "open", "NO"


def verdict(spread: Spread, goal: float, smaller_is_better: bool = False) -> str:
    """Kept where the median is; missed where no pair kept it, of at least two; otherwise the spread holds both, and it is open."""
    if smaller_is_better:
        kept, excluded = spread.median <= goal, spread.least > goal
    else:
        kept, excluded = spread.median >= goal, spread.most < goal
    return KEPT if kept else MISSED if excluded and spread.count > 1 else OPEN


def number(value: float) -> str:
    return f"{value:.2f}" if value >= 0.1 else f"{value:.1g}"


def pair_ratios(ours: list[list[float]], theirs: list[list[float]]) -> list[float]:
    """Speed of ours over theirs, pair by pair: each entry of both lists holds the seconds of one turn's steps."""
    return [statistics.median(b) / statistics.median(a) for a, b in zip(ours, theirs)]


def turn_order(sides: list, turn: int) -> list:
    """A B C, C B A, A B C: what drifts during a turn meets each side as often early as late."""
    return list(sides) if turn % 2 == 0 else list(reversed(sides))


def goes_on(done: int, least: int, most: int, spent_s: float, setting_left_s: float, run_left_s: float = float("inf")) -> bool:
    """Whether another turn of all sides is due after `done`, which took `spent_s`: at least `least`, then as many as the setting's time holds, at most `most`;
    none that the run's time does not hold, of a run that has promised to end."""
    pace = spent_s / done if done else 0
    return done < most and pace < run_left_s and (done < least or pace <= setting_left_s)
