"""What `tools/bench --publish` does with docs/benchmarks.md: a run's rows replace those of the same setting, peer and machine. No clock, no process.

The page's tables are the record. Each lies between `<!-- NAME -->` and `<!-- /NAME -->`; other sections of a run, such as `communication`, replace the text
between marks of their name. A goal that the page states holds for later runs of its setting and peer, whatever bench/comparisons.py lets a run pass with.
"""

import re
from dataclasses import dataclass
from pathlib import Path

from spread import Spread, number, verdict

RUN = ["machine", "commit", "date"]
SPEED = ["setting", "peer", "tessera", "peer's", "ratio", "least, most", "goal", "kept", *RUN]
MEMORY = ["setting", "peer", "tessera", "peer's", "ratio", "goal", "kept", "resident", "peer's resident", *RUN]
STEP = ["setting", "fastest peer's share", "attention, ms", "exposed, ms", "peer's exposed, ms", *RUN]
BOUND = "products' bound"  # the peer of a row that states the share of it


@dataclass(frozen=True)
class Figure:
    """A row of `goals`, or of `speed` where it has no goal; with `resident`, of `memory`."""

    setting: str
    peer: str
    tessera: str
    theirs: str
    value: Spread
    goal: float | None = None
    resident: tuple[str, str] | None = None

    def cells(self, goal_of_page: str) -> list[str]:
        share, sign = self.peer == BOUND, "<=" if self.resident else ">="
        show = (lambda value: f"{100 * value:.0f}%") if share else number
        goal = goal_of_page or ("" if self.goal is None else f"{sign} " + (f"{100 * self.goal:g}%" if share else f"{self.goal:g}"))
        kept = verdict(self.value, float(re.sub("[^0-9.]", "", goal)) / (100 if share else 1), bool(self.resident)) if goal else ""
        spread = f"{show(self.value.least)}, {show(self.value.most)}" if self.value.count > 1 else ""
        names = [self.setting, self.peer, self.tessera, self.theirs, show(self.value.median)]
        return [*names, goal, kept, *self.resident] if self.resident else [*names, spread, goal, kept]


def run_of(machine: str) -> list[str]:
    """Machine, commit and date of the line that run.machine() writes."""
    found = re.fullmatch(r"(\d+) cores of (.*?), (.*), torch \S+, commit (.*), (\S+)", machine)
    if not found:
        raise ValueError(f"not a line of run.machine(): {machine}")
    cores, processor, formats, commit, date = found.groups()
    words = [word for word in processor.replace("(R)", "").replace("(TM)", "").split() if word not in ("Processor", "CPU")]
    multiplies = re.match(r"16-bit products by (\w+)", formats)
    return [f"{' '.join(words[:2])}, {multiplies[1] if multiplies else 'no bf16'}" + ("" if cores == "2" else f", {cores} cores"), commit, date]


def table(header: list[str], rows: list[list[str]]) -> str:
    """Without padding: the rows are long."""
    numbers = [any(row[i] for row in rows) and all(not row[i] or row[i][0] in "-0123456789" for row in rows) for i in range(len(header))]
    rule = "|".join("---:" if right and name not in RUN else "---" for name, right in zip(header, numbers))
    return "\n".join(["| " + " | ".join(header) + " |", f"|{rule}|", *("| " + " | ".join(row) + " |" for row in rows)])


def between(text: str, name: str) -> tuple[str, str, str] | None:
    """What stands before, between and behind the marks of `name`; none: the page has no such marks."""
    begin, end = f"<!-- {name} -->\n", f"<!-- /{name} -->"
    if begin not in text or end not in text:
        return None
    head, rest = text.split(begin, 1)
    inside, tail = rest.split(end, 1)
    return head + begin, inside, end + tail


def rows_of(text: str, name: str) -> list[list[str]]:
    lines = [line for line in between(text, name)[1].splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def replaced(text: str, name: str, inside: str) -> str:
    head, _, tail = between(text, name)
    return f"{head}{inside}\n{tail}"


def merged(old: list[list[str]], new: list[list[str]], names: int) -> list[list[str]]:
    """Newest first. A row is known by its first `names` cells and its machine."""
    known = lambda row: (*row[:names], row[-3])  # noqa: E731
    fresh = {known(row) for row in new}
    return sorted([*new, *(row for row in old if known(row) not in fresh)], key=lambda row: row[-1], reverse=True)


def publish(page: Path, machine: str, figures: list[Figure], steps: list[list[str]], sections: dict[str, str]) -> None:
    """`steps`: rows of STEP without the run; `sections`: title and markdown of a run's other sections."""
    text, run = page.read_text(), run_of(machine)
    old = {name: rows_of(text, name) for name in ("goals", "speed", "memory", "step")}
    goal_at = SPEED.index("goal")
    without_goal = [[*row[:goal_at], "", "", *row[goal_at:]] for row in old["speed"]]
    goal = {(row[0], row[1]): row[goal_at] for row in old["goals"]}
    goal_of_bytes = {(row[0], row[1]): row[MEMORY.index("goal")] for row in old["memory"]}
    speeds = [[*figure.cells(goal.get((figure.setting, figure.peer), "")), *run] for figure in figures if not figure.resident]
    memory = [[*figure.cells(goal_of_bytes.get((figure.setting, figure.peer), "")), *run] for figure in figures if figure.resident]
    speeds = merged([*old["goals"], *without_goal], speeds, 2)
    text = replaced(text, "goals", table(SPEED, [row for row in speeds if row[goal_at]]))
    shorter = [[*row[:goal_at], *row[goal_at + 2 :]] for row in (SPEED, *(row for row in speeds if not row[goal_at]))]
    text = replaced(text, "speed", table(shorter[0], shorter[1:]))
    text = replaced(text, "memory", table(MEMORY, merged(old["memory"], memory, 2)))
    text = replaced(text, "step", table(STEP, merged(old["step"], [[*row, *run] for row in steps], 1)))
    for title, markdown in sections.items():
        if between(text, title):
            text = replaced(text, title, f"{machine}\n\n{markdown}")
    page.write_text(text)
