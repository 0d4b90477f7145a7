"""What tests/cuda/run measures beside tessera, of the same recipe and on the same device, one line of JSON each:

  eager, compile   a LLaMA of plain PyTorch (bf16 autocast over fp32 weights, fused AdamW, clipping), as it is and by torch.compile:
                   {"tokens_per_s", "step_s", "peak_bytes"}
  bound            the matrix products of such a step alone, with results that are there: {"products_s", "tflops"}

Needs torch and nothing else.
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench/peers"))
from bound import linear_shapes  # noqa: E402
from recipe import Recipe, Windows, read_recipe  # noqa: E402


class Block(torch.nn.Module):
    def __init__(self, recipe: Recipe):
        super().__init__()
        self.heads, self.kv_heads, dim = recipe.heads, recipe.kv_heads, recipe.dim
        kv_dim = dim // recipe.heads * recipe.kv_heads
        self.norm, self.ffn_norm = torch.nn.RMSNorm(dim, eps=1e-5), torch.nn.RMSNorm(dim, eps=1e-5)
        self.wqkv, self.wo = torch.nn.Linear(dim, dim + 2 * kv_dim, bias=False), torch.nn.Linear(dim, dim, bias=False)
        self.w13, self.w2 = torch.nn.Linear(dim, 2 * recipe.ffn_dim, bias=False), torch.nn.Linear(recipe.ffn_dim, dim, bias=False)
        self.sizes = (dim, kv_dim, kv_dim)

    def forward(self, x, cos, sin):
        batch, seq, dim = x.shape
        parts = self.wqkv(self.norm(x)).split(self.sizes, dim=-1)
        q, k, v = (part.view(batch, seq, -1, dim // self.heads).transpose(1, 2) for part in parts)
        q, k = (torch.cat((t[..., ::2] * cos - t[..., 1::2] * sin, t[..., 1::2] * cos + t[..., ::2] * sin), dim=-1).to(v.dtype) for t in (q, k))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.heads != self.kv_heads)
        x = x + self.wo(y.transpose(1, 2).reshape(batch, seq, dim))
        gate, up = self.w13(self.ffn_norm(x)).chunk(2, dim=-1)
        return x + self.w2(F.silu(gate) * up)


class Llama(torch.nn.Module):
    def __init__(self, recipe: Recipe):
        super().__init__()
        self.embed = torch.nn.Embedding(recipe.vocab_size, recipe.dim)
        self.blocks = torch.nn.ModuleList(Block(recipe) for _ in range(recipe.layers))
        self.norm, self.head = torch.nn.RMSNorm(recipe.dim, eps=1e-5), torch.nn.Linear(recipe.dim, recipe.vocab_size, bias=False)
        width = recipe.dim // recipe.heads
        angles = torch.arange(recipe.seq_len)[:, None] / 10000 ** (torch.arange(0, width, 2) / width)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, tokens, labels):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), labels.flatten())


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds(device: torch.device, body, repeats: int) -> float:
    """Median of `repeats` after two that warm up."""
    times = []
    for _ in range(repeats + 2):
        synchronize(device)
        start = time.perf_counter()
        body()
        synchronize(device)
        times.append(time.perf_counter() - start)
    return statistics.median(times[2:])


def train(recipe: Recipe, device: torch.device, micro: int, compiled: bool) -> dict:
    torch.manual_seed(0)
    model = Llama(recipe).to(device)
    forward = torch.compile(model) if compiled else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.lr, betas=recipe.betas, eps=recipe.eps, weight_decay=recipe.weight_decay, fused=True)
    windows, micro_batches = Windows(recipe), recipe.global_size // micro
    batches = [tuple(part.to(device) for part in windows.batch(m * micro, micro)) for m in range(micro_batches)]

    def step():
        optimizer.zero_grad()
        for tokens, labels in batches:
            with torch.autocast(device.type, torch.bfloat16):
                loss = forward(tokens, labels) / micro_batches
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.max_grad_norm)
        optimizer.step()

    took = seconds(device, step, 5)
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
    return {"tokens_per_s": recipe.tokens_per_step / took, "step_s": took, "peak_bytes": peak}


def bound(recipe: Recipe, device: torch.device, micro: int) -> dict:
    """Forward, gradient of the input and of the weight of every linear layer and of the head, in bf16."""
    tokens, total, flops = micro * recipe.seq_len, 0.0, 0.0

    def random(*shape):
        return torch.randn(shape, device=device).to(torch.bfloat16)

    for (fan_in, fan_out), count in linear_shapes(recipe).items():
        x, w, dy = random(tokens, fan_in), random(fan_out, fan_in), random(tokens, fan_out)
        y, dx, dw = torch.empty_like(dy), torch.empty_like(x), torch.empty_like(w)
        for left, right, out in ((x, w.t(), y), (dy, w, dx), (dy.t(), x, dw)):
            total += count * seconds(device, lambda left=left, right=right, out=out: torch.mm(left, right, out=out), 5)
            flops += count * 2 * tokens * fan_in * fan_out
    micro_batches = recipe.global_size // micro
    return {"products_s": micro_batches * total, "tflops": flops / total / 1e12}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", type=Path)
    parser.add_argument("mode", choices=("eager", "compile", "bound"))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--micro", type=int, required=True, help="sequences of a forward pass")
    options = parser.parse_args()
    recipe, device = read_recipe(options.recipe), torch.device(options.device)
    result = bound(recipe, device, options.micro) if options.mode == "bound" else train(recipe, device, options.micro, options.mode == "compile")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
