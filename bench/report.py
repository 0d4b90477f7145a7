"""Turns measurements into the tables of `make bench`."""

from sides import Measurement


def table(header: list[str], rows: list[list[str]]) -> str:
    """A markdown table whose columns line up in a terminal too; numbers to the right."""
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    right = [all(not row[i] or row[i][0] in "-0123456789" for row in rows) for i in range(len(header))]

    def line(cells):
        return "| " + " | ".join(c.rjust(w) if r else c.ljust(w) for c, w, r in zip(cells, widths, right)) + " |"

    rule = "|" + "|".join("-" * (w + 1) + (":" if r else "-") for w, r in zip(widths, right)) + "|"
    return "\n".join([line(header), rule, *map(line, rows)])


def mebibytes(count: int) -> str:
    return f"{count / 2**20:.0f}"


def milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1000:.0f}"


def against_goal(ratio: float, goal: float | None, smaller_is_better: bool = False) -> str:
    """The ratio, and whether it keeps its goal where there is one."""
    text = f"{ratio:.2f}" if ratio >= 0.1 else f"{ratio:.1g}"
    if goal is None:
        return text
    kept = ratio <= goal if smaller_is_better else ratio >= goal
    return f"{text} ({'<=' if smaller_is_better else '>='} {goal:g}: {'yes' if kept else 'NO'})"


def percent_against_goal(share: float, goal: float | None) -> str:
    verdict = "" if goal is None else f" (>= {100 * goal:g}%: {'yes' if share >= goal else 'NO'})"
    return f"{100 * share:.0f}%{verdict}"


# Bytes of weight (4), gradient (4) and AdamW's state (8) that each of n ranks holds per parameter.
STATE_BYTES = {1: lambda n: 8 + 8 / n, 2: lambda n: 4 + 12 / n, 3: lambda n: 16 / n}


class Report:
    def __init__(self, machine: str):
        self.machine = machine
        self.speed, self.memory, self.bounds, self.sharded, self.raw, self.missed = [], [], [], [], [], []

    def add(self, setting, tokens: int, ours: Measurement, theirs: dict, bound: dict, peer_exposed_s: float | None, planned: dict | None = None) -> None:
        """One setting: `theirs` maps each PeerKind to its Measurement; `bound` holds the seconds of the products alone, `planned` what `tessera plan` says of
        a sharded run."""
        name = setting.name
        for peer, measured in theirs.items():
            speed, memory = measured.median_s / ours.median_s, ours.peak_bytes / measured.peak_bytes
            self.speed.append(
                [name, peer.name, f"{tokens / ours.median_s:.0f}", f"{tokens / measured.median_s:.0f}", against_goal(speed, peer.speed_goal)]
            )
            self.memory.append(
                [name, peer.name, mebibytes(ours.peak_bytes), mebibytes(measured.peak_bytes), against_goal(memory, peer.memory_goal, True),
                 mebibytes(ours.resident_bytes), mebibytes(measured.resident_bytes)]
            )  # fmt: skip
            if peer.speed_goal and speed < peer.speed_goal:
                self.missed.append(f"{name} against {peer.name}: {speed:.2f}x, goal {peer.speed_goal:g}x")
            if peer.memory_goal and memory > peer.memory_goal:
                self.missed.append(f"{name} against {peer.name}: {memory:.2f}x of the peak bytes, goal {peer.memory_goal:g}x")
        if planned:
            state = STATE_BYTES[setting.stage](setting.ranks) * planned["parameters"]
            held = planned["params"] + planned["gradients"] + planned["optimizer"]
            self.sharded.append([name, *(mebibytes(b) for b in (state, held, planned["total"] - held, planned["total"], ours.peak_bytes))])
        fastest = min((measured for peer, measured in theirs.items() if not peer.ours), key=lambda m: m.median_s)
        products = bound["products_s"]
        share = products / ours.median_s
        if setting.bound_goal and share < setting.bound_goal:
            self.missed.append(f"{name}: {100 * share:.0f}% of the bound, goal {100 * setting.bound_goal:g}%")
        self.bounds.append(
            [name, f"{tokens / products:.0f}", percent_against_goal(share, setting.bound_goal), f"{100 * products / fastest.median_s:.0f}%",
             milliseconds(bound["attention_products_s"]), milliseconds(ours.exposed_comm_s), milliseconds(peer_exposed_s)]
        )  # fmt: skip
        self.raw.append(
            {"setting": name, "tokens_per_step": tokens, "tessera": vars(ours), "peers": {p.name: vars(m) for p, m in theirs.items()},
             "bound": bound, "peer_exposed_comm_s": peer_exposed_s}
        )  # fmt: skip

    def markdown(self) -> str:
        sharded = [
            "**Sharded state** of one rank in MiB, fp32 with AdamW: parameters, gradients and optimizer state by ZeRO's formula; those and the rest at the peak, by "
            "`tessera plan`; the peak that the run has measured.",
            table(["setting", "formula", "state, planned", "rest, planned", "peak, planned", "peak, measured"], self.sharded),
        ]
        return "\n\n".join(
            [
                "**Speed**, median tokens per second over all ranks; ratio = ours / theirs, taken in turns within one run.",
                table(["setting", "peer", "tessera", "peer's", "ratio (goal)"], self.speed),
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
