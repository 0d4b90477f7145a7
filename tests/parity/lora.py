"""LoRA beside Hugging Face's PEFT: the adapter that it wrote is where both begin, fp32 on CPU; then what each has made of it, as adapter and merged into the weights. QLoRA beside the
same with weights that bitsandbytes has quantised and brought back."""

import json
from collections.abc import Iterator
from pathlib import Path

import bitsandbytes.functional as bnb
import compare
import models
import peft
import reference
import torch
from compare import Comparison
from reference import Plan
from safetensors.torch import load_file

FAMILY = models.FAMILIES[0]
PLAN = Plan("sgd", lr=0.02, weight_decay=0.0, max_grad_norm=0.0)
MODULES = "layers.*.attention.wq, layers.*.attention.wv, layers.*.feed_forward.w*"
TARGETS = ["q_proj", "v_proj", "gate_proj", "up_proj", "down_proj"]
RANK, ALPHA, BLOCK = 3, 7.0, 64
LOSS_RTOL = 1e-6


def adapted(folder: Path, quantised: str) -> peft.PeftModel:
    """The model with an adapter of which no part is zero."""
    model = models.load(folder)
    if quantised:
        for module in model.model.layers.modules():
            if isinstance(module, torch.nn.Linear):
                module.weight.data = brought_back(module.weight.data, quantised)
    model = peft.get_peft_model(model, peft.LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=TARGETS, lora_dropout=0.0, bias="none", task_type="CAUSAL_LM"))
    generator = torch.Generator().manual_seed(5)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = 0.2 * torch.randn(parameter.shape, generator=generator)
    return model.eval()


def brought_back(weight: torch.Tensor, quantised: str) -> torch.Tensor:
    if quantised == "nf4":
        packed, state = bnb.quantize_4bit(weight, blocksize=BLOCK, quant_type="nf4")
        # By hand: their CPU path brings back other numbers where rows are no whole blocks (0.50.0: of 48 x 48 the largest error is half the largest entry).
        codes = torch.stack([packed.flatten() >> 4, packed.flatten() & 15], 1).flatten()[: weight.numel()].long()
        return (state.code[codes] * state.absmax.repeat_interleave(BLOCK)[: weight.numel()]).view(weight.shape)
    blocks = torch.nn.functional.pad(weight.flatten(), (0, -weight.numel() % BLOCK)).view(-1, BLOCK)
    scales = blocks.abs().amax(1, keepdim=True)
    return ((blocks / scales.clamp_min(1e-30) * 127).round() * (scales / 127)).flatten()[: weight.numel()].view(weight.shape)


def checks(command, text) -> Iterator[tuple[str, Comparison]]:
    folder, windows = command.scratch / "lora_base", reference.Windows(text)
    models.save(FAMILY, models.make(FAMILY), folder, torch.float32)
    for quantised in ("", "int8", "nf4"):
        name = quantised or "lora"
        theirs = adapted(folder, quantised)
        start = command.scratch / f"adapter_{name}"
        theirs.save_pretrained(start)
        their_run = reference.train(theirs, windows, PLAN, make=lambda model, plan: torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=plan.lr))
        for ranks, layout in ((1, ""), (2, "tp = 2"), (3, "dp_shard = 3")):
            setting = f"{name} {layout}"
            log, checkpoints = train(command, folder, start, text, quantised, ranks, layout)
            yield setting, compare.series("losses", log, their_run.losses, LOSS_RTOL)
            command.run("convert", checkpoints, command.scratch / f"peft_{name}_{ranks}", "--to", "peft")
            ours = load_file(command.scratch / f"peft_{name}_{ranks}" / "adapter_model.safetensors")
            yield setting, compare.tensors("adapter after 20 steps", ours, peft.get_peft_model_state_dict(theirs), compare.WEIGHT_RTOL)
        # PEFT reads what was written, and its merged weights are ours.
        back = peft.PeftModel.from_pretrained(adapted(folder, quantised).unload(), command.scratch / f"peft_{name}_1")
        merged = {n: p for n, p in back.merge_and_unload().named_parameters() if "layers" in n}
        command.run("convert", checkpoints, command.scratch / f"merged_{name}", "--to", "hf", "--merge-lora")
        files = {n: p for n, p in load_file(command.scratch / f"merged_{name}" / "model.safetensors").items() if "layers" in n}
        yield name, compare.tensors("merged weights", files, merged, compare.WEIGHT_RTOL)
        other = adapted(folder, quantised)
        for module in other.modules():
            if isinstance(getattr(module, "scaling", None), dict):
                module.scaling["default"] *= 1.1
        tokens, labels = windows.batch(0, PLAN.global_size)
        with torch.no_grad():
            scaled = reference.loss_sum(other, tokens, labels).item() / tokens.numel()
        yield name, compare.must_fail("another alpha", compare.series("losses", log[:1], [scaled], LOSS_RTOL))


def train(command, model: Path, adapter: Path, text: Path, quantised: str, ranks: int, layout: str) -> tuple[list[float], Path]:
    folder = command.scratch / f"{adapter.name}_{ranks}"
    folder.mkdir()
    recipe = folder / "recipe.toml"
    recipe.write_text(
        command.what_is_trained(model, text, PLAN)
        + f"""
[optim]
name = "sgd"
lr = {PLAN.lr}
weight_decay = 0.0
[mesh]
{layout}
[zero]
stage = {3 if "shard" in layout else 0}
[lora]
modules = {json.dumps(MODULES)}
rank = {RANK}
alpha = {ALPHA}
from_peft = {json.dumps(str(adapter))}
[quantize]
modules = {json.dumps("layers.*.attention.*, layers.*.feed_forward.*" if quantised else "")}
format = "{quantised or 'nf4'}"
block = {BLOCK}
[checkpoint]
dir = "checkpoints"
[log]
dir = "log"
[run]
steps = {PLAN.steps}
"""
    )
    command.run("train", recipe, *(["--nproc", ranks] if ranks > 1 else []))
    lines = [json.loads(line) for line in (folder / "log" / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines], folder / "checkpoints"
