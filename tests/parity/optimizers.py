"""Optimizers beside those that others wrote, in one small LLaMA: the same weights, windows and settings, fp32 on CPU.

lion: lion-pytorch; adafactor and muon: torch.optim; adam8bit: bitsandbytes' CPU path. Two things are done there with less precision than here, and as here for the comparison:
Muon's Newton-Schulz is in bf16; bitsandbytes' quantiser for CPUs finds codes by a table of even steps over [-1, 1], which are not the nearest for small numbers (its kernels for GPUs
search, and keep the sign of what would be zero).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import bitsandbytes
import bitsandbytes.backends.cpu.ops as cpu_ops
import compare
import lion_pytorch
import models
import reference
import torch
from compare import Comparison
from reference import Plan
from transformers import LlamaConfig, LlamaForCausalLM

# Matrices of several thousand elements, which Adam8bit keeps in 8 bits, in blocks that no row fills.
FAMILY = models.Family(
    "optimizers",
    lambda: LlamaForCausalLM(
        LlamaConfig(
            hidden_size=72,
            num_hidden_layers=2,
            num_attention_heads=6,
            num_key_value_heads=6,
            intermediate_size=200,
            vocab_size=models.VOCAB_SIZE,
            max_position_embeddings=models.MAX_SEQ_LEN,
            tie_word_embeddings=False,
            use_cache=False,
        )
    ),
    "model.norm.weight",
    "5GB",
)
PLANS = {
    "lion": Plan("lion", lr=1e-4, betas=(0.9, 0.99), weight_decay=0.1, max_grad_norm=1.0),
    "adafactor": Plan("adafactor", lr=0.01, weight_decay=0.01, max_grad_norm=1.0),
    "muon": Plan("muon", lr=1e-3, momentum=0.95, betas=(0.9, 0.95), weight_decay=0.1, max_grad_norm=1.0),
    "adam8bit": Plan("adam8bit", lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, max_grad_norm=1.0),
}


class Pair(torch.optim.Optimizer):
    """Two optimizers, each of parameters of its own."""

    def __init__(self, *optimizers: torch.optim.Optimizer):
        self.optimizers = optimizers

    def zero_grad(self, set_to_none: bool = True) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none)

    def step(self, closure=None) -> None:
        for optimizer in self.optimizers:
            optimizer.step()


def make(model: torch.nn.Module, plan: Plan) -> torch.optim.Optimizer:
    parameters = dict(model.named_parameters())
    common = {"lr": plan.lr, "weight_decay": plan.weight_decay}
    adam = common | {"betas": plan.betas, "eps": 1e-8}
    embedding = [p for name, p in parameters.items() if "embed" in name]
    if plan.optimizer == "lion":
        return lion_pytorch.Lion(parameters.values(), betas=plan.betas, **common)
    if plan.optimizer == "adafactor":
        return torch.optim.Adafactor(parameters.values(), eps=(1e-8, 1e-3), **common)
    if plan.optimizer == "muon":
        hidden = [p for name, p in parameters.items() if p.dim() == 2 and "layers" in name]
        rest = [p for name, p in parameters.items() if p.dim() != 2 or "layers" not in name]
        muon = torch.optim.Muon(hidden, momentum=plan.momentum, adjust_lr_fn="match_rms_adamw", **common)
        return Pair(muon, torch.optim.AdamW(rest, **adam))
    rest = [p for name, p in parameters.items() if "embed" not in name]
    return Pair(bitsandbytes.optim.AdamW8bit(rest, **adam), torch.optim.AdamW(embedding, **adam))


def quantise_to_the_nearest(values: torch.Tensor, code: torch.Tensor, absmax: torch.Tensor, out: torch.Tensor, blocksize: int) -> None:
    blocks = torch.nn.functional.pad(values.flatten(), (0, -values.numel() % blocksize)).view(-1, blocksize)
    absmax.copy_(blocks.abs().amax(1))
    relative = (blocks / absmax.unsqueeze(1).clamp_min(1e-30)).flatten()[: values.numel()]
    nearest = torch.bucketize(relative, (code[1:] + code[:-1]) / 2)
    if code[0] < 0:
        nearest = torch.where((code[nearest] == 0) & (relative < 0), nearest - 1, nearest)
    out.copy_(nearest.view(out.shape))


@contextmanager
def as_precise_as_here():
    kept = torch.Tensor.bfloat16, cpu_ops._quant_blockwise_fp32_direct
    torch.Tensor.bfloat16, cpu_ops._quant_blockwise_fp32_direct = lambda tensor: tensor.clone(), quantise_to_the_nearest
    try:
        yield
    finally:
        torch.Tensor.bfloat16, cpu_ops._quant_blockwise_fp32_direct = kept


def checks(command, text) -> Iterator[tuple[str, Comparison]]:
    folder, windows = command.scratch / FAMILY.name, reference.Windows(text)
    models.save(FAMILY, models.make(FAMILY), folder, torch.float32)
    for name, plan in PLANS.items():
        with as_precise_as_here():
            theirs = reference.train(models.load(folder), windows, plan, make=make)
        ours = command.train(folder, text, plan, dump_step=1)
        yield name, compare.adam_first_weights(ours, theirs.weights[0], theirs.gradients)
        yield name, compare.losses(ours.losses, theirs.losses)
        with as_precise_as_here():
            other = reference.train(models.load(folder), windows, replace(plan, weight_decay=2 * plan.weight_decay), make=make)
        yield name, compare.must_fail("twice the decay", compare.losses(ours.losses, other.losses))
