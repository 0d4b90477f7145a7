"""Looks at processes through /proc, and at what launchers log."""

import os
import pathlib
import re


def children(pid):
    """Process ids of the live children."""
    found = []
    for entry in pathlib.Path("/proc").glob("[0-9]*/stat"):
        try:
            after_name = entry.read_text().rpartition(")")[2].split()
        except OSError:
            continue  # gone meanwhile
        if int(after_name[1]) == pid and after_name[0] != "Z":
            found.append(int(entry.parent.name))
    return found


def rank_of(pid):
    """RANK of a process's environment; None where it has none, or is gone."""
    try:
        variables = pathlib.Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return None
    return next((int(v.split(b"=")[1]) for v in variables if v.startswith(b"RANK=")), None)


def alive(pid):
    """Whether the process runs: it exists, and is no zombie."""
    try:
        os.stat(f"/proc/{pid}/exe")
    except OSError:  # also ESRCH, which Path.exists() lets through: it ended between two looks at its folder
        return False
    return True


def attempts(log_dir):
    """(ranks, first step) of every attempt to train, as its rank 0 said it into the logs of `tessera run --log-dir`."""
    found = []
    for folder in sorted(pathlib.Path(log_dir).glob("*/attempt_*"), key=lambda folder: int(folder.name.removeprefix("attempt_"))):
        said = "".join(file.read_text(errors="replace") for file in folder.glob("0/std*.log"))
        found += [(int(ranks), int(first)) for ranks, first in re.findall(r"(\d+) ranks?, steps (\d+) to", said)]
    return found
