"""Runs the tessera command on a reference's plan and reads what it wrote."""

import json
import subprocess
from dataclasses import dataclass
from pathlib import Path

import torch
from models import SEQ_LEN
from reference import Plan
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.util.tensor_util import make_ndarray

TIMEOUT_S = 180


class CommandFailed(Exception):
    """The command ended with an error or too late; the message holds its last lines."""


@dataclass(frozen=True)
class Result:
    losses: list[float]
    grad_norms: list[float]
    gradients: dict[str, torch.Tensor]  # of the dumped step
    weights: dict[str, torch.Tensor]  # after the dumped step
    log_dir: Path


def tensorboard_series(log_dir: Path, tag: str) -> list[float]:
    """What TensorBoard itself reads from a run's events, in the order of steps."""
    accumulator = EventAccumulator(str(log_dir / "tensorboard"), size_guidance={"scalars": 0, "tensors": 0})
    accumulator.Reload()
    if tag in accumulator.Tags()["scalars"]:
        return [event.value for event in accumulator.Scalars(tag)]
    return [float(make_ndarray(event.tensor_proto)) for event in accumulator.Tensors(tag)]


class Command:
    def __init__(self, binary: Path, scratch: Path):
        self.binary, self.scratch = binary, scratch

    def run(self, *arguments: object) -> str:
        command = [str(self.binary), *map(str, arguments)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, stdin=subprocess.DEVNULL)
        except subprocess.TimeoutExpired:
            raise CommandFailed(f"{' '.join(command)}: not done after {TIMEOUT_S} s") from None
        if done.returncode != 0:
            raise CommandFailed(f"{' '.join(command)}: exit {done.returncode}: " + "\n".join(done.stderr.splitlines()[-8:]))
        return done.stdout

    def what_is_trained(self, model: Path, text: Path, plan: Plan) -> str:
        """The sections of a recipe that say on what a model is trained, and how many sequences make a step."""
        return f"""\
[model]
from_hf = {json.dumps(str(model))}

[data]
files = [{json.dumps(str(text))}]
tokenizer = "byte"
seq_len = {SEQ_LEN}
shuffle = false
cache_dir = {json.dumps(str(self.scratch / "cache"))}

[batch]
global_size = {plan.global_size}
micro_size = {plan.micro_size}
"""

    def train(self, model: Path, text: Path, plan: Plan, dump_step: int, ranks: int = 1) -> Result:
        folder = self.scratch / f"{model.name}_{plan.optimizer}_{plan.balance_loss}_{dump_step}_{ranks}"
        folder.mkdir(parents=True)
        recipe = folder / "recipe.toml"
        recipe.write_text(
            self.what_is_trained(model, text, plan)
            + f"""
[optim]
name = "{plan.optimizer}"
lr = {plan.lr}
momentum = {plan.momentum}
betas = {list(plan.betas)}
weight_decay = {plan.weight_decay}
max_grad_norm = {plan.max_grad_norm}

[moe]
balance_loss = {plan.balance_loss}
z_loss = {plan.z_loss}

[log]
dir = "log"

[run]
steps = {plan.steps}
"""
        )
        many = ["--nproc", ranks] if ranks > 1 else []
        self.run("train", recipe, *many, "--dump-step", dump_step, "--dump-dir", folder / "dump")
        lines = [json.loads(line) for line in (folder / "log" / "metrics.jsonl").read_text().splitlines()]
        return Result(
            losses=[line["loss"] for line in lines],
            grad_norms=[line["grad_norm"] for line in lines],
            gradients=load_file(folder / "dump" / "grad.safetensors"),
            weights=load_file(folder / "dump" / "weights.safetensors"),
            log_dir=folder / "log",
        )

    def evaluate(self, model: Path, text: Path) -> tuple[float, torch.Tensor]:
        """Mean loss, and the logits [B, SEQ_LEN, V] of the first windows (B is the command's choice)."""
        file = self.scratch / f"{model.name}_logits.safetensors"
        out = self.run(
            "eval", "--from-hf", model, "--file", text, "--tokenizer", "byte", "--seq-len", SEQ_LEN, "--json", "--dump-logits", file
        )  # fmt: skip
        return json.loads(out)["loss"], load_file(file)["logits"]
