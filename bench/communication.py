"""All-reduce inside this host: ours through shared memory beside Open MPI, Gloo as PyTorch calls it, and the bound of the memory; in turns within one run."""

import json
import os
import shutil
import statistics
from dataclasses import dataclass
from pathlib import Path

from report import against_goal, table
from sides import ROOT, TIME_WAS_OVER, Clock, OutOfTime, output_of
from spread import MISSED, Spread, turn_order, verdict

KIB, MIB = 1 << 10, 1 << 20
SIZES = (4 * KIB, MIB, 16 * MIB, 128 * MIB)  # of two ranks
QUICK_SIZES = (4 * KIB, MIB)
CROWD_SIZES = (4 * KIB,)  # of more ranks than cores
OURS, OURS_SHARED, MPI, GLOO, BOUND = "shm", "shm, shared buffers", "Open MPI", "Gloo", "read-add-write"


@dataclass(frozen=True)
class Goal:
    """A ratio of times that has to be kept, or, without a peer, a time in microseconds."""

    side: str
    peer: str | None
    ranks_per_core: int  # 1: two ranks; 2: twice as many as cores
    size: int
    most: float

    def text(self) -> str:
        return f"{self.side} {size_name(self.size)}" + (f" / {self.peer}" if self.peer else ", ms")


GOALS = (
    Goal(OURS, MPI, 1, 4 * KIB, 2.0),
    Goal(OURS, MPI, 1, MIB, 1.0),
    Goal(OURS, None, 1, 128 * MIB, 20_000),
    Goal(OURS_SHARED, None, 1, 128 * MIB, 15_000),
    Goal(OURS, GLOO, 2, 4 * KIB, 0.1),
)


def size_name(size: int) -> str:
    return f"{size // MIB} MiB" if size >= MIB else f"{size // KIB} KiB"


def commands(binary: Path, ranks: int, sizes: tuple[int, ...], seconds: float) -> dict[str, list[str]]:
    """How each side is asked for its rows. Sides whose program is not built or installed are left out."""
    bytes_flag, seconds_flag = ["--bytes", ",".join(map(str, sizes))], ["--seconds", str(seconds)]
    ours = [str(binary), "bench", "comm", "--op", "all_reduce", "--backend", "shm", "--nproc", str(ranks), "--json", *bytes_flag, *seconds_flag]
    sides = {OURS: ours, OURS_SHARED: [*ours, "--buffer", "shared"]}
    mpi = binary.parent / "tessera_peer_mpi"
    if mpi.exists() and shutil.which("mpirun"):
        sides[MPI] = ["mpirun", "-n", str(ranks), "--oversubscribe", str(mpi), *bytes_flag, *seconds_flag]
    sides[GLOO] = [str(ROOT / "tools" / "python"), str(ROOT / "bench" / "peers" / "gloo_all_reduce.py"), "--ranks", str(ranks), *bytes_flag, *seconds_flag]
    bound = binary.parent / "tessera_memory_bound"
    if bound.exists():
        sides[BOUND] = [str(bound), "--threads", str(ranks), *bytes_flag, *seconds_flag]
    return sides


def rows_of(command: list[str], clock: Clock) -> dict[int, float]:
    """Microseconds by size."""
    allow_root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    rows = [json.loads(line) for line in output_of(command, clock, env=os.environ | allow_root).splitlines() if line.startswith("{")]
    return {row["bytes"]: row["time_us"] for row in rows}


def measure(binary: Path, ranks: int, sizes: tuple[int, ...], seconds: float, turns: int, clock: Clock) -> dict[str, dict[int, list[float]]]:
    """Side -> size -> microseconds of each turn, in which the sides run one after the other. Out of time, of the turns that are whole; {} where none is."""
    sides = commands(binary, ranks, sizes, seconds)
    seen: dict[str, dict[int, list[float]]] = {name: {size: [] for size in sizes} for name in sides}
    for turn in range(turns):
        found = {}
        try:
            for name in turn_order(sides, turn):
                clock.say(f"communication: {ranks} ranks, turn {turn + 1} of {turns}, {name}")
                found[name] = rows_of(sides[name], clock)
        except OutOfTime:
            return seen if turn else {}
        for name, rows in found.items():
            for size in sizes:
                seen[name][size].append(rows[size])
    return seen


def microseconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.{2 if value < 100 else 0}f}"


class CommunicationReport:
    def __init__(self):
        self.times: dict[int, dict[str, dict[int, list[float]]]] = {}
        self.crowd = max(4, 2 * len(os.sched_getaffinity(0)))  # ranks, twice as many as cores
        self.missed: list[str] = []
        self.turns = 0

    def run(self, binary: Path, quick: bool, clock: Clock) -> None:
        """Throws OutOfTime where there is nothing to show."""
        self.turns, seconds = (2, 0.2) if quick else (5, 0.4)
        for ranks, sizes in ((2, QUICK_SIZES if quick else SIZES), (self.crowd, CROWD_SIZES)):
            if found := measure(binary, ranks, sizes, seconds, self.turns, clock):
                self.times[ranks] = found
        if not self.times:
            raise OutOfTime

    def what_is_missing(self) -> list[str]:
        done = {ranks: 0 for ranks in (2, self.crowd)}
        for ranks, times in self.times.items():
            done[ranks] = min(len(turns) for by_size in times.values() for turns in by_size.values())
        short = [f"{count} of {self.turns} turns of {ranks} ranks" for ranks, count in done.items() if count < self.turns]
        return [f"{TIME_WAS_OVER}: {', '.join(short)}."] if short else []

    def goal_rows(self) -> list[list[str]]:
        rows = []
        for goal in GOALS:
            ranks = 2 if goal.ranks_per_core == 1 else self.crowd
            times = self.times.get(ranks, {})
            ours, peer = times.get(goal.side, {}).get(goal.size), times.get(goal.peer, {}).get(goal.size) if goal.peer else 1000
            if ours is None or peer is None:
                continue  # not measured in this run
            peers = peer if isinstance(peer, list) else [peer] * len(ours)
            ratio, most = Spread.of([a / b for a, b in zip(ours, peers)]), goal.most if goal.peer else goal.most / 1000
            rows.append([goal.text(), str(ranks), against_goal(ratio, most, smaller_is_better=True)])
            if verdict(ratio, most, smaller_is_better=True) == MISSED:
                self.missed.append(f"{goal.text()}: {ratio}, goal {most:g}")
        return rows

    def markdown(self) -> str:
        sides = [OURS, OURS_SHARED, MPI, GLOO, BOUND]
        rows = []
        for ranks, times in self.times.items():
            for size in sorted({size for by_size in times.values() for size in by_size}):
                turns = [times.get(side, {}).get(size) for side in sides]
                found = [statistics.median(turn) if turn else None for turn in turns]
                share = f"{100 * found[-1] / found[1]:.0f}%" if found[-1] else "-"
                rows.append([size_name(size), str(ranks), *map(microseconds, found), share])
        self.missed.clear()
        goals = self.goal_rows()
        return "\n\n".join(
            [
                "**All-reduce** in this host, fp32, microseconds: the median of each turn, and of the turns; goals as median [least, most] of the turns' ratios. The bound is a plain parallel read-add-write of "
                "the same bytes in as many threads; the share is its time over that of shared buffers.",
                table(["bytes", "ranks", *sides, "of bound"], rows),
                table(["goal", "ranks", "value (goal)"], goals),
                *self.what_is_missing(),
            ]
        )
