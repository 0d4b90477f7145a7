"""The same training in plain PyTorch: windows as data.shuffle = false gives them, a global batch in micro-batches, one device."""

from dataclasses import dataclass, field
from pathlib import Path

import torch
from models import SEQ_LEN, as_filed
from transformers import PreTrainedModel


@dataclass(frozen=True)
class Plan:
    """A run of both sides."""

    optimizer: str  # sgd, adamw, or one of optimizers.py
    lr: float
    weight_decay: float
    max_grad_norm: float
    momentum: float = 0.0
    betas: tuple[float, float] = (0.9, 0.999)
    steps: int = 20
    global_size: int = 6
    micro_size: int = 2
    balance_loss: float = 0.0  # of a mixture of experts, as ours define them: per layer and micro-batch
    z_loss: float = 0.0


@dataclass(frozen=True)
class Plant:
    """A bug put into the reference on purpose, which a parity check must find."""

    name: str
    halved: str = ""  # the parameter whose gradient is halved
    dropped: int = -1  # the micro-batch whose gradient is left out


NO_PLANT = Plant("none")


@dataclass
class Run:
    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)  # of step 1, before clipping
    weights: list[dict[str, torch.Tensor]] = field(default_factory=list)  # after each step


class Windows:
    def __init__(self, text: Path):
        self.tokens = torch.frombuffer(bytearray(text.read_bytes()), dtype=torch.uint8).long()
        self.count = (len(self.tokens) - 1) // SEQ_LEN

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        begin = index % self.count * SEQ_LEN
        return self.tokens[begin : begin + SEQ_LEN], self.tokens[begin + 1 : begin + SEQ_LEN + 1]

    def batch(self, first: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens and labels, int64 [size, SEQ_LEN]."""
        tokens, labels = zip(*(self[first + i] for i in range(size)))
        return torch.stack(tokens), torch.stack(labels)


def logits(model: PreTrainedModel, tokens: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=tokens).logits


def router_terms(model: PreTrainedModel, router_logits: tuple, plan: Plan) -> torch.Tensor:
    """The balance term of Switch, E sum_e f_e P_e, and the z term of ST-MoE, summed over layers."""
    total = torch.zeros(())
    for logits in router_logits:
        probabilities = torch.softmax(logits, -1)
        chosen = probabilities.topk(model.config.num_experts_per_tok).indices
        shares = torch.nn.functional.one_hot(chosen, logits.shape[-1]).float().mean((0, 1))
        total = total + plan.balance_loss * logits.shape[-1] * (shares * probabilities.mean(0)).sum()
        total = total + plan.z_loss * torch.logsumexp(logits, -1).square().mean()
    return total


def loss_sum(model: PreTrainedModel, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    scores = model(input_ids=tokens).logits
    return torch.nn.functional.cross_entropy(scores.flatten(0, 1), labels.flatten(), reduction="sum")


def evaluate(model: PreTrainedModel, windows: Windows) -> float:
    """Mean nats per token over all windows."""
    with torch.no_grad():
        total = sum(loss_sum(model, *windows.batch(i, 1)).double() for i in range(windows.count))
    return float(total) / (windows.count * SEQ_LEN)


def make_optimizer(model: PreTrainedModel, plan: Plan) -> torch.optim.Optimizer:
    if plan.optimizer == "sgd":
        return torch.optim.SGD(model.parameters(), lr=plan.lr, momentum=plan.momentum, weight_decay=plan.weight_decay)
    return torch.optim.AdamW(model.parameters(), lr=plan.lr, betas=plan.betas, eps=1e-8, weight_decay=plan.weight_decay)


def copies(tensors) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in as_filed(tensors).items()}


def train(model: PreTrainedModel, windows: Windows, plan: Plan, plant: Plant = NO_PLANT, make: callable = make_optimizer) -> Run:
    """Trains `model` in place."""
    optimizer, run = make(model, plan), Run()
    parameters = dict(model.named_parameters())
    tokens_per_step = plan.global_size * SEQ_LEN
    for step in range(plan.steps):
        loss = 0.0
        optimizer.zero_grad()
        for micro in range(plan.global_size // plan.micro_size):
            tokens, labels = windows.batch(step * plan.global_size + micro * plan.micro_size, plan.micro_size)
            part = loss_sum(model, tokens, labels) / tokens_per_step
            loss += part.item()
            if plan.balance_loss or plan.z_loss:
                terms = router_terms(model, model(input_ids=tokens, output_router_logits=True).router_logits, plan)
                part = part + terms * tokens.numel() / tokens_per_step
            if micro != plant.dropped:
                part.backward()
        if plant.halved:
            parameters[plant.halved].grad *= 0.5
        if step == 0:
            run.gradients = copies((name, p.grad) for name, p in parameters.items() if p.grad is not None)
        run.grad_norms.append(torch.nn.utils.clip_grad_norm_(parameters.values(), plan.max_grad_norm or float("inf")).item())
        optimizer.step()
        run.losses.append(loss)
        run.weights.append(copies(parameters.items()))
    return run
