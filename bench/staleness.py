#!/usr/bin/env python3
"""What stale weights cost: the same updates by a synchronous pipeline of 4 stages, by PipeDream, its vertical sync and PipeDream-2BW, side by side.

  tools/python bench/staleness.py [text] [vit] [--seeds N] [--updates N] [--epochs N]

text  a small LLaMA on the dictionary of `make demo`: loss on the text it learns from and on text that was held out, for several learning rates
vit   examples/vit_digits: a small vision transformer on the 1,797 digits that scikit-learn carries: test accuracy

Prints tables in markdown (docs/pipeline.md holds them). What it makes lies in build/staleness, scikit-learn (bench/staleness_requirements.txt) too.
"""

import argparse
import gzip
import importlib.machinery
import importlib.util
import json
import os
import re
import statistics
import subprocess
import sys
from pathlib import Path

from report import table

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build" / "release"
OUT = ROOT / "build" / "staleness"
STAGES = 4
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1"}
WAYS = {"1f1b": "1F1B", "pipedream": "PipeDream", "vertical sync": "vertical sync", "2BW": "2BW"}


def output_of(*command: object) -> str:
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, env=ENVIRONMENT)
    if done.returncode != 0:
        sys.exit(f"{' '.join(map(str, command))}\nended with {done.returncode}:\n{done.stderr[-2000:]}")
    return done.stdout


def demo_text() -> tuple[Path, Path]:
    loader = importlib.machinery.SourceFileLoader("demo", str(ROOT / "tools" / "demo"))
    demo = importlib.util.module_from_spec(importlib.util.spec_from_loader("demo", loader))
    loader.exec_module(demo)
    demo.OUT = OUT
    parts = []
    for file, size in zip(demo.prepare_text(), (4 << 20, 48 << 10)):  # as much as the runs see
        file.write_bytes(file.read_bytes()[:size])
        parts.append(file)
    return parts[0], parts[1]


def text(updates: int, rates: list[float]) -> str:
    """An update is of 8 sequences, whichever way; windows between two drained pipelines are of 20 updates."""
    train, held_out = demo_text()
    window = 20
    # Schedule, and how many sequences a micro-batch and a step have.
    ways = {
        "1f1b": (["pipeline.schedule=1f1b"], 2, 8),
        "pipedream": (["pipeline.schedule=pipedream"], 8, 8 * window),
        "vertical sync": (["pipeline.schedule=pipedream", "pipeline.vertical_sync=true"], 8, 8 * window),
        "2BW": (["pipeline.schedule=pipedream_2bw", "pipeline.per_update=4"], 2, 8 * window),
    }
    rows = []
    for rate in rates:
        row = [f"{rate:g}"]
        for name, (schedule, micro, batch) in ways.items():
            steps = updates * 8 // batch
            log = OUT / f"log {name} {rate:g}"
            settings = [
                *schedule, f"mesh.pp={STAGES}", f"data.files=[{json.dumps(str(train))}]", f"data.validation_files=[{json.dumps(str(held_out))}]",
                f"data.cache_dir={OUT / 'cache'}", "data.tokenizer=byte", "model.vocab_size=259", "data.seq_len=64", "model.dim=64", "model.ffn_dim=172",
                f"batch.micro_size={micro}", f"batch.global_size={batch}", f"optim.lr={rate}", "optim.max_grad_norm=0", "optim.schedule=constant",
                "optim.warmup_steps=0", "optim.min_lr=0", "precision.compute=fp32", f"run.steps={steps}", f"run.validate_every={steps}",
                "run.threads=1", "comm.backend=gloo", f"log.dir={log}", "checkpoint.dir=",
            ]  # fmt: skip
            subprocess.run(["rm", "-rf", str(log)], check=True)
            output_of(BUILD / "bin" / "tessera", "train", ROOT / "recipes" / "demo.toml", "--nproc", STAGES, *(a for s in settings for a in ("--set", s)))
            metrics = [json.loads(line) for line in (log / "metrics.jsonl").read_text().splitlines()]
            last = metrics[-max(1, len(metrics) // 10) :]
            held = json.loads((log / "validation.jsonl").read_text().splitlines()[-1])["loss"]
            row.append(f"{statistics.mean(step['loss'] for step in last):.3f} / {held:.3f}")
            print(f"text, lr {rate:g}, {name}: {row[-1]}", file=sys.stderr, flush=True)
        rows.append(row)
    return table(["learning rate", *WAYS.values()], rows)


def digits() -> Path:
    """The images as examples/vit_digits reads them, from the table that scikit-learn's package carries."""
    packages, file = OUT / "packages", OUT / "digits.bin"
    source = packages / "sklearn" / "datasets" / "data" / "digits.csv.gz"
    if not source.exists():
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", packages, "-r", ROOT / "bench" / "staleness_requirements.txt"]
        subprocess.run([str(part) for part in pip], check=True)
    file.write_bytes(bytes(int(float(cell)) for line in gzip.open(source, "rt") for cell in line.split(",")))
    return file


def spread(values: list[float]) -> str:
    return f"{statistics.mean(values):.1f} +- {statistics.stdev(values):.1f}" if len(values) > 1 else f"{values[0]:.1f}"


def vit(seeds: int, epochs: int, rates: dict[str, list[float]]) -> str:
    file, rows = digits(), []
    for optimizer, lrs in rates.items():
        for rate in lrs:
            found = {name: [] for name in WAYS}
            for seed in range(1, seeds + 1):
                out = output_of(
                    BUILD / "bin" / "tessera", "run", "--nproc_per_node", STAGES, BUILD / "examples" / "vit_digits", file, "--seed", seed, "--lr", rate,
                    "--epochs", epochs, "--optimizer", optimizer,
                )  # fmt: skip
                for name in WAYS:
                    early, accuracy, loss = re.search(rf"{name} +test accuracy (\S+) then (\S+)  training loss (\S+)", out).groups()
                    found[name].append((100 * float(early), 100 * float(accuracy), float(loss)))
                print(f"vit, {optimizer}, lr {rate:g}, seed {seed}: {({name: values[-1] for name, values in found.items()})}", file=sys.stderr, flush=True)
            for which, label in enumerate((epochs // 3, epochs)):
                rows.append([f"{optimizer}, {rate:g}", str(label), *(spread([run[which] for run in found[name]]) for name in WAYS)])
    return table(["optimizer, learning rate", "epochs", *WAYS.values()], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="*", default=[], metavar="text|vit")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--updates", type=int, default=400)
    parser.add_argument("--epochs", type=int, default=30)
    flags = parser.parse_args()
    OUT.mkdir(parents=True, exist_ok=True)
    if not flags.what or "text" in flags.what:
        print(f"Training loss (mean of the last tenth) / held-out loss after {flags.updates} updates of 8 sequences:\n")
        print(text(flags.updates, [2.5e-4, 1e-3, 4e-3]), flush=True)
    if not flags.what or "vit" in flags.what:
        print(f"\nTest accuracy in percent, mean and deviation of {flags.seeds} seeds, after so many epochs of 45 updates:\n")
        print(vit(flags.seeds, flags.epochs, {"adamw": [5e-4, 2e-3], "sgd": [0.02]}), flush=True)


if __name__ == "__main__":
    main()
