"""Kills a training job at random moments, again and again, and holds what is left of it against a run that nobody disturbed.

The job is `tessera run --max-restarts ... -- tessera train` with a checkpoint every few steps. Each kill takes, by `kill -9`, a random rank or the launcher itself
(which is then started again, as an operator would): while the ranks start, while they train, or while they save. It is right where
  - every attempt begins after the newest checkpoint that existed at the kill: no step that was checkpointed is lost,
  - metrics.jsonl holds every step once, in order, with the numbers of the undisturbed run,
  - the last checkpoint is equal to the undisturbed run's, bit for bit,
  - nothing is left: no process, no half-written checkpoint.

  tools/soak [--kills 200] [--ranks 2] [--seed N]
  tools/soak --kills-in-save 200           every kill while a checkpoint is being written: half of them in the foreground, half in the background
"""

import argparse
import dataclasses
import os
import pathlib
import random
import signal
import subprocess
import sys
import tempfile
import time

from processes import alive, attempts, children, rank_of
from support import TESSERA, english, environment, metrics

KEYS = ("step", "loss", "grad_norm", "lr", "tokens")
SAVE_EVERY = 4
LONGEST_STRETCH = 30  # steps between two kills at most, so that the job outlives all of them
LONGEST_WAIT = 0.005  # s between the moment that is waited for and the kill, at most: about as long as a save takes
RECIPE = """
[model]
family = "llama"
dim = 32
layers = 2
heads = 2
ffn_dim = 64
vocab_size = 256
dropout = 0.1
[data]
files = ["text.txt"]
tokenizer = "byte"
seq_len = 32
[batch]
global_size = 6
[optim]
name = "adamw"
lr = 1e-3
max_grad_norm = 1.0
[run]
steps = {steps}
seed = 3
threads = 1
"""


class SoakFailed(AssertionError):
    """What was found to be wrong; the message says with which seed, and after which kill."""


MOMENTS = {"start": 2, "train": 5, "save": 3}  # how often each is drawn


@dataclasses.dataclass
class Kill:
    """What is killed, and when: "start" within a second after the ranks were started, "train" so many steps later, "save" while a checkpoint is being written."""

    moment: str
    victim: str  # "rank" or "launcher"


def draw_kill(draw, moments):
    return Kill(draw.choices(*zip(*moments.items()))[0], draw.choices(("rank", "launcher"), (5, 1))[0])


class Job:
    """A launcher, its ranks, and what they leave in a folder."""

    def __init__(self, folder, recipe, ranks, restarts, more=()):
        self.folder, self.log_dir, self.checkpoints, self.output = folder, folder / "log", folder / "checkpoints", folder / "output.txt"
        sets = (f"log.dir={self.log_dir}", f"checkpoint.dir={self.checkpoints}", f"checkpoint.every={SAVE_EVERY}", "checkpoint.keep=3", "checkpoint.resume=latest", *more)
        self.flags = ["--standalone", "--nproc-per-node", str(ranks), "--max-restarts", str(restarts)]
        self.program = [TESSERA, "train", str(recipe), *(flag for setting in sets for flag in ("--set", setting))]
        folder.mkdir()
        self.launcher, self.launchers = None, 0

    def start(self):
        command = [TESSERA, "run", *self.flags, "--log-dir", str(self.folder / f"launcher_{self.launchers}"), "--", *self.program]
        self.launchers += 1
        with open(self.output, "ab") as output:
            self.launcher = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, env=environment())

    def ended(self):
        return self.launcher.poll() is not None

    def end(self):
        if self.launcher is not None and not self.ended():
            self.launcher.kill()
            self.launcher.wait()

    def ranks(self):
        """Process id by rank, of those that run."""
        found = {rank_of(pid): pid for pid in children(self.launcher.pid)}
        found.pop(None, None)
        return found

    def first_steps(self):
        """The step at which each attempt that came so far began, as it said itself."""
        return [first for launcher in range(self.launchers) for _, first in attempts(self.folder / f"launcher_{launcher}")]

    def steps_done(self):
        try:
            return (self.log_dir / "metrics.jsonl").read_bytes().count(b"\n")
        except FileNotFoundError:
            return 0

    def saving(self):
        return any(self.checkpoints.glob(".tmp-step-*"))

    def newest_checkpoint(self):
        return max((int(folder.name.removeprefix("step-")) for folder in self.checkpoints.glob("step-*")), default=0)

    def tail(self):
        return self.output.read_text(errors="replace")[-3000:]


class Soak:
    """`kills` of each of the disturbed jobs, of which there is one for each entry of `background`: whether it saves while it trains on."""

    def __init__(self, folder, kills, ranks, seed, say, moments=MOMENTS, background=(True,)):
        self.folder, self.kills, self.ranks, self.seed, self.say = pathlib.Path(folder), kills, ranks, seed, say
        self.moments, self.background = moments, background
        self.torn = 0  # kills that left half a checkpoint behind
        self.draw = random.Random(seed)
        english(self.folder / "text.txt")
        self.steps = kills * (LONGEST_STRETCH + SAVE_EVERY) + 20
        self.recipe = self.folder / "soak.toml"
        self.recipe.write_text(RECIPE.format(steps=self.steps))
        self.deadline = time.monotonic() + 120 + 15 * kills * len(background)
        self.done = 0  # kills
        self.seen = set()  # process ids of ranks

    def check(self, condition, text, job):
        if not condition:
            raise SoakFailed(f"seed {self.seed}, after {self.done} kills: {text}\n{job.tail()}")

    def wait_for(self, what, condition, job):
        """Until it holds; False where the job ended before."""
        while not condition():
            if job.ended():
                return False
            self.check(time.monotonic() < self.deadline, f"waited in vain for {what}", job)
            time.sleep(0.002)
        return True

    def undisturbed(self, jobs):
        job = Job(self.folder / "undisturbed", self.recipe, self.ranks, 0)
        jobs.append(job)
        job.start()
        self.wait_for("the undisturbed run", job.ended, job)
        self.check(job.launcher.returncode == 0, f"the undisturbed run ended with {job.launcher.returncode}", job)

    def wait_for_moment(self, kill, job, attempt):
        """`attempt` counts those that have begun to train before these ranks were started."""
        begun = lambda: len(job.first_steps()) > attempt  # noqa: E731
        if kill.moment == "start":
            moment = time.monotonic() + self.draw.uniform(0, 1)
            self.wait_for("a moment", lambda: time.monotonic() > moment or begun(), job)
            return
        self.wait_for("the ranks to begin", begun, job)
        steps = job.steps_done() + self.draw.randint(0, LONGEST_STRETCH)
        self.wait_for("steps", lambda: job.steps_done() >= steps, job)
        if kill.moment == "save":
            self.wait_for("a checkpoint", job.saving, job)
        time.sleep(self.draw.uniform(0, LONGEST_WAIT))

    def strike(self, victim, job):
        """Returns the process ids that have to be gone before the next attempt."""
        pids = sorted(job.ranks().values())
        self.seen.update(pids)
        try:
            os.kill(self.draw.choice(pids) if victim == "rank" and pids else job.launcher.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass  # it has just ended by itself
        if victim == "launcher" or not pids:
            job.launcher.wait()
            job.start()
        return pids

    def disturbed(self, jobs, background):
        # The undisturbed run saves in the foreground: the other's checkpoints must be the same bytes.
        name, setting = ("background", "true") if background else ("foreground", "false")
        job = Job(self.folder / name, self.recipe, self.ranks, self.kills + 1, [f"checkpoint.async={setting}"])
        jobs.append(job)
        job.start()
        gone, attempt, newest = [], 0, 0
        for self.done in range(1, self.kills + 1):
            kill = draw_kill(self.draw, self.moments)
            self.wait_for("ranks to start", lambda: len(set(job.ranks().values()) - set(gone)) == self.ranks, job)
            self.wait_for_moment(kill, job, attempt)
            self.check(not job.ended(), f"the job ended early, with {job.launcher.poll()}", job)
            self.check_attempts(job, attempt, newest)
            newest = job.newest_checkpoint()
            self.say(f"{name}, kill {self.done} of {self.kills}: {kill.victim}, {kill.moment}, {job.steps_done()} steps done, newest checkpoint {newest}")
            gone = self.strike(kill.victim, job)
            self.torn += job.saving()
            self.wait_for("the killed attempt to end", lambda: not any(map(alive, gone)), job)
            attempt = len(job.first_steps())
        self.wait_for("the end", job.ended, job)
        self.check(job.launcher.returncode == 0, f"the job ended with {job.launcher.returncode}", job)
        self.check_attempts(job, attempt, newest)

    def check_attempts(self, job, known, newest):
        """Those after the first `known` began while a checkpoint of step `newest` was there."""
        for first in job.first_steps()[known:]:
            self.check(first > newest, f"an attempt began at step {first} although a checkpoint of step {newest} was there", job)

    def compare(self, job, reference):
        lines, expected = metrics(job.log_dir), metrics(reference.log_dir)
        steps = [line["step"] for line in lines]
        self.check(steps == list(range(1, self.steps + 1)), f"metrics.jsonl is not the steps 1 to {self.steps}, each once: {steps}", job)
        for line, want in zip(lines, expected):
            for key in KEYS:
                self.check(line[key] == want[key], f"step {line['step']}: {key} is {line[key]}, undisturbed {want[key]}", job)
        final = f"step-{self.steps:08}"
        got, want = ({path.name: path.read_bytes() for path in (side.checkpoints / final).glob("*.safetensors")} for side in (job, reference))
        self.check(want and sorted(got) == sorted(want), f"{final} holds {sorted(got)}, undisturbed {sorted(want)}", job)
        for name, content in want.items():
            self.check(got[name] == content, f"{name} of {final} differs from the undisturbed run's", job)
        self.check(not job.saving(), "a half-written checkpoint is left", job)
        orphans = [pid for pid in self.seen if rank_of(pid) is not None and alive(pid)]
        self.check(not orphans, f"processes {orphans} are left", job)

    def run(self):
        """The undisturbed job and the last of the others, after all kills and comparisons."""
        jobs = []
        try:
            self.undisturbed(jobs)
            for background in self.background:
                self.disturbed(jobs, background)
                self.compare(jobs[-1], jobs[0])
        finally:
            for job in jobs:
                job.end()  # its ranks go with it
        self.attempts = sum(len(job.first_steps()) for job in jobs[1:])
        return jobs[0], jobs[-1]


def soak(kills, ranks=2, seed=None, say=lambda text: None, in_save=False):
    """Runs it in a folder of its own. Returns the finished Soak; throws SoakFailed."""
    seed = random.randrange(2**32) if seed is None else seed
    with tempfile.TemporaryDirectory(prefix="tessera-soak-") as folder:
        run = Soak(folder, -(-kills // 2), ranks, seed, say, {"save": 1}, (False, True)) if in_save else Soak(folder, kills, ranks, seed, say)
        run.run()
        return run


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--kills-in-save", type=int, default=0, help="so many instead, all while a checkpoint is being written")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seed", type=int, help="of the moments and victims; a random one otherwise")
    options = parser.parse_args()
    seed = random.randrange(2**32) if options.seed is None else options.seed
    kills, in_save = (options.kills_in_save, True) if options.kills_in_save else (options.kills, False)
    what = f"{kills} kills" + (" during saves" if in_save else "")
    print(f"soak: {what} of {options.ranks} ranks, --seed {seed}", flush=True)
    start = time.monotonic()
    try:
        run = soak(kills, options.ranks, seed, lambda text: print(f"soak: {text}", flush=True), in_save)
    except SoakFailed as failure:
        print(f"soak: {failure}", file=sys.stderr)
        return 1
    print(
        f"soak: {what}, of which {run.torn} left half a checkpoint behind; {run.attempts} attempts that trained, {time.monotonic() - start:.0f} s: "
        "equal to the undisturbed run, bit for bit"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
