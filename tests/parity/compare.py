"""The comparisons, each with the bound that it holds tessera to. What passes here passes everywhere: planted bugs go through the same functions."""

import math
from dataclasses import dataclass

import torch

LOGITS_ATOL = 1e-4
GRADIENT_RTOL = 1e-5  # of the tensor's largest entry
WEIGHT_RTOL = 1e-5  # of the tensor's largest entry
LOSS_RTOL = 5e-6
NORM_RTOL = 1e-5
FP32_RTOL = 1e-6  # of a number that was stored as fp32 on its way
CLEAR_GRADIENT = 1e-3  # of the tensor's largest entry: below it, Adam's first update turns noise into full steps


@dataclass(frozen=True)
class Comparison:
    what: str
    worst: float
    bound: float
    where: str = ""

    @property
    def passed(self) -> bool:
        return self.worst <= self.bound  # false for nan


class Planted(Comparison):
    """A comparison with a planted bug: passes exactly when the comparison finds it, and finds it in a difference of numbers."""

    @property
    def passed(self) -> bool:
        return self.bound < self.worst < float("inf")


def must_fail(plant: str, found: Comparison) -> Comparison:
    return Planted(f"{found.what} must fail: {plant}", found.worst, found.bound, found.where)


def logits(ours: torch.Tensor, theirs: torch.Tensor) -> Comparison:
    if ours.shape != theirs.shape:
        return Comparison("logits", math.inf, LOGITS_ATOL, f"shape {list(ours.shape)}, theirs {list(theirs.shape)}")
    return Comparison("logits", (ours.float() - theirs).abs().max().item(), LOGITS_ATOL)


def series(what: str, ours: list[float], theirs: list[float], bound: float) -> Comparison:
    """Largest relative difference of two lists, step by step."""
    if len(ours) != len(theirs):
        return Comparison(what, math.inf, bound, f"{len(ours)} steps, theirs {len(theirs)}")
    differences = [abs(a - b) / abs(b) for a, b in zip(ours, theirs)]
    worst = max(range(len(differences)), key=lambda i: differences[i])
    return Comparison(what, differences[worst], bound, f"step {worst + 1}")


def losses(ours: list[float], theirs: list[float]) -> Comparison:
    return series("losses", ours, theirs, LOSS_RTOL)


def grad_norms(ours: list[float], theirs: list[float]) -> Comparison:
    return series("gradient norms", ours, theirs, NORM_RTOL)


def tensors(what: str, ours: dict, theirs: dict, bound: float, keep: dict | None = None) -> Comparison:
    """Largest difference relative to each tensor's largest entry. Names and shapes must be the same; `keep` holds masks of the entries that count."""
    if odd := sorted(ours.keys() ^ theirs.keys()):
        return Comparison(what, math.inf, bound, "only one side has " + ", ".join(odd))
    worst, where = 0.0, ""
    for name, expected in theirs.items():
        if ours[name].shape != expected.shape:
            return Comparison(what, math.inf, bound, f"{name}: shape {list(ours[name].shape)}, theirs {list(expected.shape)}")
        difference = (ours[name].float() - expected).abs()
        if keep:
            difference = difference[keep[name]]
        relative = difference.max().item() / max(expected.abs().max().item(), torch.finfo(torch.float32).tiny) if difference.numel() else 0.0
        if not relative <= worst:
            worst, where = relative, name
    return Comparison(what, worst, bound, where)


def gradients(ours: dict, theirs: dict) -> Comparison:
    return tensors("gradients of step 1", ours, theirs, GRADIENT_RTOL)


def weights(what: str, ours: dict, theirs: dict) -> Comparison:
    return tensors(what, ours, theirs, WEIGHT_RTOL)


def adam_first_weights(ours, theirs: dict, gradient: dict) -> Comparison:
    """Weights of a run (`ours`) after Adam's first update, which is about lr * sign(gradient): where the gradient is noise so is its sign, and the entry says
    nothing. Zero is no noise where both sides have it: a row that no token meets; of a key's bias, whose gradient is noise, one side may."""
    clear = {name: ((g == 0) & (ours.gradients[name] == 0)) | (g.abs() >= CLEAR_GRADIENT * g.abs().max()) & (g != 0) for name, g in gradient.items()}
    return tensors("weights after step 1", ours.weights, theirs, WEIGHT_RTOL, clear)
