"""The two sides of a comparison: tessera's command and a waiting peer, each asked for a few steps at a time."""

import json
import os
import signal
import statistics
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TIME_WAS_OVER = "The time was over"  # how a section says what it lacks
WARMUP_STEPS = 5  # of every process: the first steps touch memory for the first time, which on a virtual machine can take longer than the step itself


class SideFailed(Exception):
    """A process of a comparison ended early; the message holds its last lines."""


class OutOfTime(Exception):
    """What --quick promises is over; what was measured so far stands."""


class Clock:
    """Since the run began, and how long it may take; without a limit it may take as long as it does. The last `tail_s` of it are for what follows the last
    measurement: ending processes, and writing results."""

    def __init__(self, limit_s: float | None = None, tail_s: float = 0):
        self.start, self.limit_s, self.tail_s = time.monotonic(), limit_s, tail_s

    def passed(self) -> float:
        return time.monotonic() - self.start

    def left(self) -> float:
        """For measurements."""
        return self.to_end() - self.tail_s

    def to_end(self) -> float:
        return float("inf") if self.limit_s is None else self.limit_s - self.passed()

    def timeout(self) -> float | None:
        """For a process that is waited for."""
        if self.limit_s is None:
            return None
        if self.left() <= 0:
            raise OutOfTime
        return self.left()

    def say(self, text: str) -> None:
        print(f"[{self.passed():5.0f} s] {text}", file=sys.stderr, flush=True)


def end(process: subprocess.Popen) -> None:
    """At once, with all that it has started: what is left of its session would keep its output open."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()


def output_of(command: list, clock: Clock, **more) -> str:
    """Of a command that has to end well, and in time."""
    command = [str(part) for part in command]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True, start_new_session=True, **more)
    try:
        out, errors = process.communicate(timeout=clock.timeout())
    except BaseException as late:
        end(process)
        process.communicate()
        if isinstance(late, subprocess.TimeoutExpired):
            raise OutOfTime from None
        raise
    if process.returncode != 0:
        raise SideFailed(f"{' '.join(command)}\nended with {process.returncode}:\n{errors[-2000:]}")
    return out


@dataclass
class Measurement:
    """What a side has shown so far. Times are seconds of one optimizer step, memory is the maximum over ranks."""

    turns: list[list[float]] = field(default_factory=list)  # each: its steps
    peak_bytes: int = 0
    resident_bytes: int = 0
    exposed_comm_s: float | None = None

    @property
    def median_s(self) -> float:
        return statistics.median(step for turn in self.turns for step in turn)


class Tessera:
    """`tessera train` on a recipe; each call of `steps` is a fresh run of the command."""

    def __init__(self, binary: Path, recipe: Path, settings: list[str], ranks: int, scratch: Path, clock: Clock, warmup: int = WARMUP_STEPS):
        self.clock, self.warmup = clock, warmup
        self.log_dir = scratch / "tessera"
        self.command = [str(binary), "train", str(recipe)]
        if ranks > 1:
            self.command += ["--nproc", str(ranks)]
        for setting in [*settings, f"log.dir={self.log_dir}"]:
            self.command += ["--set", setting]
        self.measured = Measurement()
        self.exposed: list[float] = []

    def steps(self, count: int) -> None:
        command = [*self.command, "--set", f"run.steps={self.warmup + count}"]
        self.log_dir.mkdir(parents=True, exist_ok=True)
        output = self.log_dir / "output.txt"
        with open(output, "wb") as log:
            process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, start_new_session=True)
            try:
                usage = self.wait(process)
            except BaseException:
                end(process)
                raise
        if process.returncode != 0:
            raise SideFailed(f"{' '.join(command)}\nended with {process.returncode}:\n{tail(output)}")
        lines = [json.loads(line) for line in (self.log_dir / "metrics.jsonl").read_text().splitlines()]
        kept = lines[self.warmup :]
        self.measured.turns.append([line["step_s"] for line in kept])
        self.measured.peak_bytes = max(self.measured.peak_bytes, *(line["peak_bytes"] for line in kept))
        self.measured.resident_bytes = max(self.measured.resident_bytes, usage.ru_maxrss * 1024)
        self.exposed += [line["exposed_comm_s"] for line in kept if "exposed_comm_s" in line]

    def wait(self, process: subprocess.Popen):
        """Its use of resources, which Popen does not tell."""
        while True:
            pid, status, usage = os.wait4(process.pid, os.WNOHANG)
            if pid:
                process.returncode = os.waitstatus_to_exitcode(status)
                return usage
            if self.clock.left() <= 0:
                raise OutOfTime
            time.sleep(0.01)

    def note_memory(self) -> None:
        """Every run says it."""

    def planned(self) -> dict | None:
        """What `tessera plan` says of the rank that needs most, with the number of the model's parameters; nothing where there is no time to ask."""
        command = [self.command[0], "plan", *self.command[2:], "--json"]
        if "--nproc" in command:
            command[command.index("--nproc")] = "--world"
        try:
            plan = json.loads(output_of(command, self.clock))
        except OutOfTime:
            return None
        return max((ranks["peak_bytes"] for ranks in plan["ranks"]), key=lambda peak: peak["total"]) | {"parameters": plan["parameters"]}

    def close(self) -> None:
        """Nothing of ours waits between its turns."""

    def finish(self) -> Measurement:
        if self.exposed:
            self.measured.exposed_comm_s = statistics.median(self.exposed)
        return self.measured


class Peer:
    """A process of bench/peers/peer.py that waits for commands between its turns."""

    def __init__(self, recipe: Path, arguments: list[str], scratch: Path, clock: Clock, warmup: int = WARMUP_STEPS):
        self.clock, self.warmup = clock, warmup
        self.log = scratch / "peer.txt"
        self.command = [str(ROOT / "tools" / "peer_python"), str(ROOT / "bench" / "peers" / "peer.py"), str(recipe), *arguments]
        scratch.mkdir(parents=True, exist_ok=True)
        with open(self.log, "wb") as errors:
            self.process = subprocess.Popen(self.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, start_new_session=True)
        self.measured = Measurement()
        self.warm = False

    def ask(self, command: str) -> dict:
        try:
            self.process.stdin.write(command + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            pass  # the peer has died: its last lines say why
        guard = None if self.clock.limit_s is None else threading.Timer(max(0.0, self.clock.left()), end, [self.process])
        if guard:
            guard.start()
        try:
            for line in self.process.stdout:
                if line.startswith("{"):
                    return json.loads(line)
        finally:
            if guard:
                guard.cancel()
        if self.clock.left() <= 0:
            raise OutOfTime
        raise SideFailed(f"{' '.join(self.command)}\nended with {self.process.wait()}:\n{tail(self.log)}")

    def steps(self, count: int) -> None:
        if not self.warm:
            self.ask(f"step {self.warmup}")
            self.warm = True
        self.measured.turns.append(self.ask(f"step {count}")["step_s"])

    def local_steps(self, count: int) -> list[float]:
        """Seconds of steps without all-reduce; of use under DDP alone."""
        return self.ask(f"local {count}")["step_s"]

    def bound(self) -> dict:
        return self.ask("bound")

    def note_memory(self) -> None:
        """Trains a step under a tracker."""
        memory = self.ask("memory")
        self.measured.peak_bytes, self.measured.resident_bytes = memory["peak_bytes"], memory["resident_bytes"]

    def finish(self) -> Measurement:
        return self.measured

    def close(self) -> None:
        """Ends the process, also one that hangs."""
        try:
            self.process.communicate("quit\n", timeout=30 if self.clock.limit_s is None else max(0.0, min(5.0, self.clock.to_end() / 4)))
        except (BrokenPipeError, ValueError, subprocess.TimeoutExpired):
            pass
        end(self.process)


def tail(path: Path, lines: int = 15) -> str:
    return "\n".join(path.read_text(errors="replace").splitlines()[-lines:])

