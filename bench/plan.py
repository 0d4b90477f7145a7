"""Which sections a run of the bench has, in which order, and how long each may take. No clock, no process."""

from dataclasses import dataclass

from comparisons import QUICK_SETTINGS, SETTINGS

COMMUNICATION, COMPRESSION, RECOMPUTE, CONTEXT, MIXTURE = "communication", "compression", "recomputation", "context", "mixture"
OPTIMIZERS, KERNELS, OFFLOAD, PARTS = "optimizers", "kernels", "offload", "parts"
QUICK_S = 180  # what --quick promises
SETTING_S = 150  # of the full run: a setting takes more turns while this lasts
TAIL_S = 10  # of it: to end what is under way, and to write results


@dataclass(frozen=True)
class Section:
    name: str
    kind: str  # "setting", or one of those above
    setting: object = None


def names() -> list[str]:
    return [*(s.name for s in SETTINGS), COMMUNICATION, COMPRESSION, RECOMPUTE, CONTEXT, MIXTURE, OPTIMIZERS, KERNELS, OFFLOAD, PARTS]


def choose(only: str | None, quick: bool, parts: bool = True) -> list[Section]:
    """In the order in which they run: what is compared first, the rooms' own parts, which take minutes, last. `only`: those that are named, with commas between
    them, by their whole name or by what it contains, whether --quick has them or not."""
    settings = SETTINGS if only and not quick else QUICK_SETTINGS if quick else SETTINGS
    sections = [Section(s.name, "setting", s) for s in settings]
    sections.append(Section(COMMUNICATION, COMMUNICATION))
    if not quick or only:
        sections += [Section(kind, kind) for kind in (COMPRESSION, RECOMPUTE, CONTEXT, MIXTURE, OPTIMIZERS, KERNELS, OFFLOAD)]
        sections += [Section(PARTS, PARTS)] if parts else []
    if not only:
        return sections
    wanted = [part.strip() for part in only.split(",")]
    whole = {section.name for section in sections} & set(wanted)
    return [section for section in sections if section.name in whole or any(part in section.name for part in wanted if part not in whole)]


def share_of(left_s: float, sections_left: int) -> float:
    """Seconds for the next section of a run that has `left_s` for measurements: an even share, which those that need less leave to the others."""
    return max(0.0, left_s) / max(1, sections_left)
