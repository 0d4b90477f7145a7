"""A peer that trains on command: Hugging Face LLaMA on PyTorch, eager or compiled, fp32 or bf16 autocast, alone or under DDP, FSDP2, tensor parallelism or a
pipeline (1F1B) over Gloo, with or without recomputing its blocks in backward.

Commands come on stdin, one a line; each is answered with one line of JSON on stdout:
  step N   train N steps                 {"step_s": [...], "loss": [...]}
  local N  N steps without all-reduce    {"step_s": [...], "loss": [...]}     (DDP: the difference to `step` is the exposed communication)
  memory   train one step under a tracker {"peak_bytes": ..., "resident_bytes": ...}   (maximum over ranks)
  bound    the step's products alone      {"products_s": ..., "attention_products_s": ...}
  quit
Waiting for a command costs no processor time, so several peers can wait while one is measured.

  tools/peer_python bench/peers/peer.py recipes/bench_vocab.toml --compute bf16 <<< $'step 3\\nmemory\\nbound\\nquit'
"""

import argparse
import contextlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from bound import measure_bound, measure_stage_bound
from llama import LOSSES, LlamaLoss, loss_of
from memory import live_bytes, optimizer_tensors, peak_bytes, resident_bytes
from ranks import free_port
from recipe import Windows, read_recipe
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel


TENSOR_PARALLEL = ("tp", "tp-sequence")


def clip_grad_norm(groups: list[list[torch.nn.Parameter]], most: float) -> None:
    """torch.nn.utils.clip_grad_norm_ of parameters in groups, each all plain tensors or all DTensors: it takes no mixture."""
    norms = [torch.nn.utils.get_total_norm([parameter.grad for parameter in group]) for group in groups]
    total = torch.stack([norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms]).norm()
    for group in groups:
        torch.nn.utils.clip_grads_with_norm_(group, most, total)


class PipelinedForward:
    """One rank's stage, with the schedule that runs it: forward and backward of all micro-batches of a step."""

    def __init__(self, module: LlamaLoss, options, micro_batches: int):
        self.module = module.stage(options.rank, options.ranks, options.split)
        stage = PipelineStage(self.module, options.rank, options.ranks, torch.device("cpu"))
        self.is_last = options.rank == options.ranks - 1
        self.schedule = Schedule1F1B(stage, micro_batches, loss_fn=loss_of)

    def __call__(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """The mean loss where the last stage is, 0 elsewhere; gradients are there."""
        losses = []
        if self.is_last:
            self.schedule.step(target=labels, losses=losses)
        else:
            self.schedule.step(tokens)
        return torch.stack(losses).mean() if losses else torch.zeros(())

    def clip(self, most: float) -> None:
        """By the norm over all stages."""
        norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in self.module.parameters()])
        squares = norm.square()
        dist.all_reduce(squares)
        torch.nn.utils.clip_grads_with_norm_(self.module.parameters(), most, squares.sqrt())


class Trainer:
    """One rank's share of a step, of the batch or of the layers: forward, backward, clip, fused AdamW."""

    def __init__(self, options, recipe):
        torch.manual_seed(0)
        self.recipe = recipe
        self.rank, self.ranks = options.rank, options.ranks
        self.is_cut = self.ranks > 1 and options.sharding in TENSOR_PARALLEL
        self.is_piped = self.ranks > 1 and options.sharding == "pp"
        self.takes_all = self.is_cut or self.is_piped
        self.sequences = recipe.global_size // (1 if self.takes_all else options.ranks)
        self.micro_batches, self.blocks = recipe.global_size, options.split  # of one sequence each
        self.dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[options.compute]
        self.windows = Windows(recipe)
        self.steps = 0
        self.module = LlamaLoss(recipe, options.loss)
        if options.from_hf:
            self.module.llama.load_state_dict(type(self.module.llama).from_pretrained(options.from_hf).state_dict())
        if options.recompute:
            self.module.recompute_blocks()
        if self.ranks > 1 and options.sharding == "fsdp2":
            self.module.shard(self.ranks)
        if self.is_cut:
            self.module.cut(self.ranks, sequence_parallel=options.sharding == "tp-sequence")
        self.pipeline = PipelinedForward(self.module, options, self.micro_batches) if self.is_piped else None
        if self.pipeline:
            self.module = self.pipeline.module
        self.parameters = list(self.module.parameters())
        kinds = [[p for p in self.parameters if isinstance(p, DTensor)], [p for p in self.parameters if not isinstance(p, DTensor)]]
        self.groups = [group for group in kinds if group]
        if self.ranks > 1 and options.sharding == "ddp":
            self.module = torch.nn.parallel.DistributedDataParallel(self.module, gradient_as_bucket_view=True)
        self.forward = torch.compile(self.module) if options.compile else self.module
        self.optimizer = torch.optim.AdamW(
            [{"params": group} for group in self.groups], lr=recipe.lr, betas=recipe.betas, eps=recipe.eps, weight_decay=recipe.weight_decay, fused=True
        )

    def step(self) -> torch.Tensor:
        first = self.steps * self.recipe.global_size + (0 if self.takes_all else self.rank * self.sequences)
        tokens, labels = self.windows.batch(first, self.sequences)
        with loss_parallel() if self.is_cut else contextlib.nullcontext():
            with torch.autocast("cpu", torch.bfloat16, enabled=self.dtype == torch.bfloat16):
                loss = (self.pipeline or self.forward)(tokens, labels)
            if not self.pipeline:
                loss.backward()
        if self.recipe.max_grad_norm > 0:
            self.pipeline.clip(self.recipe.max_grad_norm) if self.pipeline else clip_grad_norm(self.groups, self.recipe.max_grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.steps += 1
        return loss.full_tensor().detach() if isinstance(loss, DTensor) else loss.detach()

    def run_steps(self, count: int, synchronise: bool) -> dict:
        times, losses = [], []
        with contextlib.nullcontext() if synchronise or self.ranks == 1 or self.is_piped else self.module.no_sync():
            for _ in range(count):
                start = time.perf_counter()
                loss = self.step()
                times.append(time.perf_counter() - start)
                losses.append(loss)
        return {"step_s": times, "loss": [loss.item() for loss in losses]}

    def measure_memory(self) -> dict:
        gradients = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        before = live_bytes(self.parameters, self.module.buffers(), optimizer_tensors(self.optimizer), gradients)
        return {"peak_bytes": peak_bytes(before, self.step), "resident_bytes": resident_bytes()}

    def measure_bound(self) -> dict:
        if self.is_piped:
            return measure_stage_bound(self.recipe, self.micro_batches, self.dtype, len(self.module.model.layers), has_head=self.pipeline.is_last)
        return measure_bound(self.recipe, self.sequences, self.dtype, cut=self.ranks if self.is_cut else 1)

    def answer(self, command: str) -> dict:
        verb, *arguments = command.split()
        if verb in ("step", "local"):
            return self.run_steps(int(arguments[0]), synchronise=verb == "step")
        return {"memory": self.measure_memory, "bound": self.measure_bound}[verb]()


def slowest(answers: list[dict]) -> dict:
    """Over ranks: the maximum of every number, place by place in lists."""
    first = answers[0]
    return {
        key: [max(column) for column in zip(*(a[key] for a in answers))] if isinstance(first[key], list) else max(a[key] for a in answers)
        for key in first
    }


def serve(trainer: Trainer) -> None:
    """Rank 0 reads the commands and hands them on; every rank carries them out; rank 0 answers."""
    while True:
        command = [(sys.stdin.readline().strip() or "quit") if trainer.rank == 0 else None]
        if trainer.ranks > 1:
            dist.broadcast_object_list(command)
        if command[0] == "quit":
            return
        answers = [trainer.answer(command[0])]
        if trainer.ranks > 1:
            mine, answers = answers[0], [None] * trainer.ranks
            dist.all_gather_object(answers, mine)
        if trainer.rank == 0:
            print(json.dumps(slowest(answers)), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", type=Path)
    parser.add_argument("--compute", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--compile", action="store_true", help="torch.compile the model with its loss")
    parser.add_argument("--loss", choices=LOSSES, default="whole")
    parser.add_argument("--recompute", action="store_true", help="torch.utils.checkpoint around every block, use_reentrant=False")
    parser.add_argument("--ranks", type=int, default=1, help="processes over Gloo")
    sharding = "of several: whole replicas; fully_shard of each block and of the rest; layers that are cut, without and with sequence parallelism; a pipeline"
    parser.add_argument("--sharding", choices=("ddp", "fsdp2", *TENSOR_PARALLEL, "pp"), default="ddp", help=sharding)
    parser.add_argument("--split", type=int, default=0, help="pp: blocks of the first of two stages; micro-batches have one sequence each")
    parser.add_argument("--from-hf", type=Path, help="start from these weights")
    parser.add_argument("--threads", type=int, default=0, help="per rank; default: cores / ranks")
    parser.add_argument("--rank", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    recipe = read_recipe(options.recipe)
    if options.sharding == "pp" and options.ranks != 2:
        raise SystemExit(f"--ranks {options.ranks}: a pipeline here has two")
    if recipe.global_size % options.ranks:
        raise SystemExit(f"--ranks {options.ranks} must divide batch.global_size = {recipe.global_size}")
    torch.set_num_threads(options.threads or max(1, len(os.sched_getaffinity(0)) // options.ranks))

    others = []
    if options.ranks > 1:
        if options.rank == 0:
            options.port = free_port()
            for rank in range(1, options.ranks):
                others.append(subprocess.Popen([sys.executable, *sys.argv, "--rank", str(rank), "--port", str(options.port)], stdin=subprocess.DEVNULL))
        dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{options.port}", rank=options.rank, world_size=options.ranks)
    serve(Trainer(options, recipe))
    if options.ranks > 1:
        dist.destroy_process_group()
    for process in others:
        process.wait()


if __name__ == "__main__":
    main()
