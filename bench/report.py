"""Turns measurements into the tables of `make bench`."""

import statistics

from publish import BOUND, Figure
from sides import Measurement
from spread import MISSED, Spread, number, pair_ratios, verdict


def table(header: list[str], rows: list[list[str]]) -> str:
    """A markdown table whose columns line up in a terminal too; numbers to the right."""
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    right = [all(not row[i] or row[i][0] in "-0123456789" for row in rows) for i in range(len(header))]

    def line(cells):
        return "| " + " | ".join(c.rjust(w) if r else c.ljust(w) for c, w, r in zip(cells, widths, right)) + " |"

    rule = "|" + "|".join("-" * (w + 1) + (":" if r else "-") for w, r in zip(widths, right)) + "|"
    return "\n".join([line(header), rule, *map(line, rows)])


def mebibytes(count: int) -> str:
    """`count`: 0 where it is not known."""
    return f"{count / 2**20:.0f}" if count else "-"


def milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1000:.0f}"


def against_goal(value: float | Spread, goal: float | None, smaller_is_better: bool = False) -> str:
    """The value, and whether it keeps its goal where there is one: `open` where the spread holds both answers."""
    spread = value if isinstance(value, Spread) else Spread(value, value, value, 2)  # a number that does not vary
    text = str(value) if isinstance(value, Spread) else number(value)
    if goal is None:
        return text
    return f"{text} ({'<=' if smaller_is_better else '>='} {goal:g}: {verdict(spread, goal, smaller_is_better)})"


def percent(spread: Spread) -> str:
    return f"{100 * spread.median:.0f}%" + (f" [{100 * spread.least:.0f}, {100 * spread.most:.0f}]" if spread.count > 1 else "")


def percent_against_goal(share: Spread, goal: float | None) -> str:
    return percent(share) + ("" if goal is None else f" (>= {100 * goal:g}%: {verdict(share, goal)})")


# Bytes of weight (4), gradient (4) and AdamW's state (8) that each of n ranks holds per parameter.
STATE_BYTES = {1: lambda n: 8 + 8 / n, 2: lambda n: 4 + 12 / n, 3: lambda n: 16 / n}


class Report:
    """Of one setting."""

    def __init__(self):
        self.speed, self.memory, self.bounds, self.sharded, self.raw, self.missed = [], [], [], [], [], []
        self.figures: list[Figure] = []  # of the page (publish.py), as are rows of its table of steps
        self.steps: list[list[str]] = []

    def add(self, setting, tokens: int, ours: Measurement, theirs: dict, bounds: list[dict], peer_exposed_s: float | None, planned: dict | None = None) -> None:
        """`theirs` maps each PeerKind to its Measurement; `bounds` holds, for each turn, the seconds of the products alone, `planned` what `tessera plan` says
        of a sharded run."""
        name = setting.name
        for peer, measured in theirs.items():
            speed = Spread.of(pair_ratios(ours.turns, measured.turns))
            memory = ours.peak_bytes / measured.peak_bytes if measured.peak_bytes else None  # None: there was no time to ask
            self.speed.append(
                [name, peer.name, f"{tokens / ours.median_s:.0f}", f"{tokens / measured.median_s:.0f}", str(speed.count), against_goal(speed, peer.speed_goal)]
            )
            self.memory.append(
                [name, peer.name, mebibytes(ours.peak_bytes), mebibytes(measured.peak_bytes),
                 "-" if memory is None else against_goal(memory, peer.memory_goal, True), mebibytes(ours.resident_bytes), mebibytes(measured.resident_bytes)]
            )  # fmt: skip
            self.figures.append(Figure(name, peer.name, f"{tokens / ours.median_s:.0f}", f"{tokens / measured.median_s:.0f}", speed, peer.speed_goal))
            if memory is not None:
                peaks, resident = ((mebibytes(getattr(side, of)) for side in (ours, measured)) for of in ("peak_bytes", "resident_bytes"))
                self.figures.append(Figure(name, peer.name, *peaks, Spread(memory, memory, memory, 2), peer.memory_goal, tuple(resident)))
            if peer.speed_goal and verdict(speed, peer.speed_goal) == MISSED:
                self.missed.append(f"{name} against {peer.name}: {speed}x in {speed.count} pairs, goal {peer.speed_goal:g}x")
            if peer.memory_goal and memory is not None and memory > peer.memory_goal:
                self.missed.append(f"{name} against {peer.name}: {memory:.2f}x of the peak bytes, goal {peer.memory_goal:g}x")
        if planned:
            state = STATE_BYTES[setting.stage](setting.ranks) * planned["parameters"]
            held = planned["params"] + planned["gradients"] + planned["optimizer"]
            self.sharded.append([name, *(mebibytes(b) for b in (state, held, planned["total"] - held, planned["total"], ours.peak_bytes))])
        fastest = min((measured for peer, measured in theirs.items() if not peer.ours), key=lambda m: m.median_s)
        products = [bound["products_s"] for bound in bounds]
        share, of_fastest = (Spread.of(pair_ratios(side.turns, [[s] for s in products])) for side in (ours, fastest))
        if setting.bound_goal and verdict(share, setting.bound_goal) == MISSED:
            self.missed.append(f"{name}: {percent(share)} of the bound, goal {100 * setting.bound_goal:g}%")
        attention = statistics.median(bound["attention_products_s"] for bound in bounds)
        self.bounds.append(
            [name, f"{tokens / statistics.median(products):.0f}", percent_against_goal(share, setting.bound_goal), percent(of_fastest),
             milliseconds(attention), milliseconds(ours.exposed_comm_s), milliseconds(peer_exposed_s)]
        )  # fmt: skip
        bound = f"{tokens / statistics.median(products):.0f}"
        self.figures.append(Figure(name, BOUND, f"{tokens / ours.median_s:.0f}", bound, share, setting.bound_goal))
        self.steps.append([name, percent(of_fastest), milliseconds(attention), milliseconds(ours.exposed_comm_s), milliseconds(peer_exposed_s)])
        self.raw.append(
            {"setting": name, "tokens_per_step": tokens, "tessera": vars(ours), "peers": {p.name: vars(m) for p, m in theirs.items()},
             "bounds": bounds, "peer_exposed_comm_s": peer_exposed_s}
        )  # fmt: skip

    def markdown(self) -> str:
        sharded = [
            "**Sharded state** of one rank in MiB, fp32 with AdamW: parameters, gradients and optimizer state by ZeRO's formula; those and the rest at the peak, by "
            "`tessera plan`; the peak that the run has measured.",
            table(["setting", "formula", "state, planned", "rest, planned", "peak, planned", "peak, measured"], self.sharded),
        ]
        return "\n\n".join(
            [
                "**Speed**, median tokens per second over all ranks; ratio = ours / theirs, of each pair of turns: median [least, most]. A goal is missed (NO) "
                "where no pair kept it, and open where some did and the median does not.",
                table(["setting", "peer", "tessera", "peer's", "pairs", "ratio (goal)"], self.speed),
                "**Bound**: the step's matrix products alone (same shapes, type, threads, library), and how much of a step they are. Attention's own "
                "products (as full squares) and the communication that backward does not hide, in milliseconds per step.",
                table(
                    ["setting", "bound, tokens/s", "tessera's share (goal)", "fastest peer's share", "attention, ms", "exposed, ms", "peer's exposed, ms"],
                    self.bounds,
                ),
                "**Memory** of one rank in MiB: peak of the bytes that the allocator hands out in a step, and resident memory.",
                table(["setting", "peer", "tessera", "peer's", "ratio (goal)", "resident", "peer's"], self.memory),
                *(sharded if self.sharded else []),
            ]
        )
