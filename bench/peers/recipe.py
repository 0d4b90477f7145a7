"""Reads the benchmark recipes, so that both sides of a comparison have one definition of model, batch and optimizer."""

import tomllib
from dataclasses import dataclass
from pathlib import Path

import torch


@dataclass(frozen=True)
class Recipe:
    """The keys of a tessera recipe that a peer needs; names and meanings are docs/configuration.md's."""

    dim: int
    layers: int
    heads: int
    kv_heads: int
    ffn_dim: int
    vocab_size: int
    seq_len: int
    global_size: int
    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    max_grad_norm: float
    files: tuple[Path, ...]

    @property
    def tokens_per_step(self) -> int:
        return self.global_size * self.seq_len


def read_recipe(path: Path) -> Recipe:
    with open(path, "rb") as file:
        toml = tomllib.load(file)
    model, data, optim = toml["model"], toml["data"], toml["optim"]
    if model["family"] != "llama" or optim["name"] != "adamw" or data["tokenizer"] != "byte":
        raise SystemExit(f"{path}: the peers know family llama, optimizer adamw and tokenizer byte")
    return Recipe(
        dim=model["dim"],
        layers=model["layers"],
        heads=model["heads"],
        kv_heads=model.get("kv_heads", model["heads"]),
        ffn_dim=model["ffn_dim"],
        vocab_size=model["vocab_size"],
        seq_len=data["seq_len"],
        global_size=toml["batch"]["global_size"],
        lr=optim["lr"],
        betas=tuple(optim.get("betas", (0.9, 0.999))),
        eps=optim.get("eps", 1e-8),
        weight_decay=optim.get("weight_decay", 0.01),
        max_grad_norm=optim.get("max_grad_norm", 0.0),
        files=tuple(path.parent / name for name in data["files"]),
    )


class Windows:
    """Byte tokens of the recipe's text in windows of seq_len + 1, in the order of the text (tessera's data.shuffle = false)."""

    def __init__(self, recipe: Recipe):
        text = b"".join(path.read_bytes() for path in recipe.files)
        self.tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
        self.seq_len = recipe.seq_len
        self.count = (len(text) - 1) // recipe.seq_len
        if self.count < 1:
            raise SystemExit(f"{recipe.files}: {len(text)} bytes give no window of {recipe.seq_len} tokens")

    def batch(self, first: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens and labels, both int64 [size, seq_len], of windows first .. first + size - 1; after the last window the text starts again."""
        starts = [(w % self.count) * self.seq_len for w in range(first, first + size)]
        rows = torch.stack([self.tokens[s : s + self.seq_len + 1] for s in starts])
        return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
