"""What the system tests share: the command, small texts, and readers of what a run writes. Standard library and numpy only.

A start of the command costs a fifth of a second of processor time, a step of these models some milliseconds: a test that starts three ranks where two would show
it pays more than by anything it trains. Of one process, `run` therefore makes commands by a fork that has loaded libtorch before."""

import ctypes
import functools
import json
import os
import pathlib
import random
import select
import signal
import struct
import subprocess
import sys
import tempfile
import unittest

SOURCE = pathlib.Path(__file__).resolve().parents[2]
TESSERA = os.environ.get("TESSERA_BINARY", str(SOURCE / "build/release/bin/tessera"))
LAUNCHER_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def environment(**extra):
    env = {k: v for k, v in os.environ.items() if k not in LAUNCHER_VARIABLES}
    env["OMP_NUM_THREADS"] = "1"  # threads that wait for each other on a busy machine spin for longer than they compute
    env.update(extra)
    return env


def run(*arguments, timeout=120, **extra):
    """Runs the command to its end; returns the finished process with text output."""
    words = [str(argument) for argument in arguments]
    mine = all(name.startswith("TESSERA_") for name in extra)  # others are for libraries to read as they are loaded
    if is_one_process(words) and mine and "torch" not in sys.modules:  # whose threads a fork lacks, and whose kernels our library replaces
        return run_forked(words, timeout, extra)
    return subprocess.run([TESSERA, *words], capture_output=True, text=True, timeout=timeout, env=environment(**extra))


def is_one_process(words):
    """Whether such a command starts no others: they would begin as this Python did."""
    several = "--nproc" in words and words[words.index("--nproc") + 1 :][:1] != ["1"]
    return words[:1] not in (["run"], ["bench"]) and not several and not any(word.startswith("--nproc=") for word in words)


@functools.cache
def command():
    """What bin/tessera calls when it has loaded its library (cli/start.cpp), loaded here."""
    os.environ["OMP_NUM_THREADS"] = "1"  # which is read then
    return ctypes.CDLL(str(pathlib.Path(TESSERA).parent.parent / "lib/libtessera_cli.so"), mode=os.RTLD_LAZY | os.RTLD_GLOBAL).tessera_command


def run_forked(words, timeout, extra):
    """The command in a copy of this process."""
    call, argv = command(), [os.fsencode(word) for word in (TESSERA, *words)]
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        child = os.fork()
        if child == 0:
            try:
                os.dup2(out.fileno(), 1)
                os.dup2(err.fileno(), 2)
                for variable in LAUNCHER_VARIABLES:
                    os.environ.pop(variable, None)
                os.environ.update(extra)
                for number in (signal.SIGINT, signal.SIGPIPE):
                    signal.signal(number, signal.SIG_DFL)
                os._exit(call(len(argv), (ctypes.c_char_p * (len(argv) + 1))(*argv, None)))
            finally:
                os._exit(99)
        ended = os.pidfd_open(child)
        in_time = bool(select.select([ended], [], [], timeout)[0])
        os.close(ended)
        if not in_time:
            os.kill(child, signal.SIGKILL)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        texts = [stream.seek(0) or stream.read().decode() for stream in (out, err)]
        if not in_time:
            raise subprocess.TimeoutExpired(argv, timeout, *texts)
        return subprocess.CompletedProcess(argv, code, *texts)


@functools.cache
def english_text(words, seed):
    draw = random.Random(seed)
    vocabulary = ["".join(draw.choice("etaoinshrdlu") for _ in range(draw.randint(2, 7))) for _ in range(300)]
    out = []
    for _ in range(words):
        out.append(vocabulary[min(int(draw.expovariate(1 / 40)), 299)])
        if draw.random() < 0.08:
            out[-1] += ".\n"
    return " ".join(out)


def english(path, words=20000, seed=0):
    """Writes pseudo-English with structure that a small model can learn."""
    path.write_text(english_text(words, seed))
    return path


def metrics(log_dir):
    return [json.loads(line) for line in (pathlib.Path(log_dir) / "metrics.jsonl").read_text().splitlines()]


def safetensors(path):
    """A minimal reader: name -> numpy array (F32 and I64 are all that dumps hold)."""
    import numpy  # takes longer to load than many a test takes

    data = pathlib.Path(path).read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + size])
    kinds = {"F32": numpy.float32, "I64": numpy.int64, "F64": numpy.float64}
    tensors = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        begin, end = entry["data_offsets"]
        tensors[name] = numpy.frombuffer(data[8 + size + begin : 8 + size + end], kinds[entry["dtype"]]).reshape(entry["shape"])
    return tensors


RECIPE = """
[model]
family = "{family}"
dim = 48
layers = 3
heads = 4
kv_heads = {kv_heads}
ffn_dim = 96
vocab_size = 259
[data]
files = ["text.txt"]
validation_files = ["held_out.txt"]
tokenizer = "byte"
seq_len = 32
[batch]
global_size = 12
micro_size = 2
[optim]
name = "adamw"
lr = 1e-3
max_grad_norm = 1.0
schedule = "cosine"
warmup_steps = 3
[run]
steps = 20
seed = 7
threads = 1
"""


class SystemTest(unittest.TestCase):
    """Gives each test a folder with a text and a recipe."""

    def setUp(self):
        self._folder = tempfile.TemporaryDirectory(prefix="tessera-test-")
        self.folder = pathlib.Path(self._folder.name)
        english(self.folder / "text.txt")
        english(self.folder / "held_out.txt", words=1500, seed=1)
        self.recipe = self.write_recipe()

    def tearDown(self):
        self._folder.cleanup()

    def once(self, name, make):
        """A folder that `make(path)` fills the first time that a test of the class asks for it. What changes it takes a copy."""
        made = self.__class__.__dict__.get("_made")
        if made is None:
            place = tempfile.TemporaryDirectory(prefix="tessera-test-")
            self.addClassCleanup(place.cleanup)
            self.__class__._made = made = (pathlib.Path(place.name), set())
        if name not in made[1]:
            make(made[0] / name)
            made[1].add(name)
        return made[0] / name

    def write_recipe(self, name="run.toml", family="llama", kv_heads=2, text=RECIPE):
        path = self.folder / name
        path.write_text(text.format(family=family, kv_heads=kv_heads))
        return path

    def train(self, tag, *arguments, nproc=1, sets=(), expect=0, recipe=None, **extra):
        """Trains into folder/tag and returns (finished process, log folder)."""
        log_dir = self.folder / tag
        flags = [x for s in (f"log.dir={log_dir}", *sets) for x in ("--set", s)]
        done = run("train", recipe or self.recipe, "--nproc", nproc, *flags, *arguments, **extra)
        self.assertEqual(done.returncode, expect, f"exit {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
        return done, log_dir

    def refusal(self, done):
        """The last line on stderr of a run that was refused with exit 2."""
        self.assertEqual(done.returncode, 2, done.stderr)
        return done.stderr.strip().splitlines()[-1]

    def assert_equal_tensors(self, actual, expected, what=""):
        self.assertEqual(sorted(actual), sorted(expected))
        for name, want in expected.items():
            self.assertTrue(actual[name].shape == want.shape and (actual[name] == want).all(), f"{what} {name}")

    def assert_close_tensors(self, actual, expected, bound):
        self.assertEqual(sorted(actual), sorted(expected))
        for name, want in expected.items():
            scale = abs(want).max()
            difference = abs(actual[name] - want).max()
            self.assertLessEqual(difference, bound * scale, f"{name}: differs by {difference:.3g}, largest entry {scale:.3g}")

    def assert_close_losses(self, actual, expected, bound):
        self.assertEqual(len(actual), len(expected))
        for a, e in zip(actual, expected):
            self.assertEqual(a["step"], e["step"])
            self.assertLessEqual(abs(a["loss"] - e["loss"]), bound * abs(e["loss"]), f"step {a['step']}: {a['loss']} against {e['loss']}")
