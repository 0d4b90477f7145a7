"""One mixture-of-experts layer, forward and backward on one thread: ours, Hugging Face Mixtral's, and the layer's matrix products alone, in turns.

Both sides get random tokens, new ones in each turn as in training, so their loads are near even and never the same. Processor time; the ratio is the median over turns of theirs by ours. transformers multiplies the
experts one by one (eager) or by libtorch's grouped product (grouped_mm). Prints one line of JSON.

  tools/peer_python bench/peers/mixture.py build/release/bin/tessera_mixture_side --compute fp32
"""

import argparse
import json
import statistics
import subprocess
import time
from pathlib import Path

import torch
from transformers import MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock


class Ours:
    def __init__(self, binary: Path, shape: list[int], compute: str):
        self.process = subprocess.Popen([binary, *map(str, shape), compute], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)

    def run(self, what: str) -> float:
        self.process.stdin.write(what + "\n")
        self.process.stdin.flush()
        return float(self.process.stdout.readline())


class Theirs:
    def __init__(self, tokens: int, dim: int, ffn_dim: int, experts: int, per_token: int, dtype: torch.dtype, implementation: str):
        config = MixtralConfig(hidden_size=dim, intermediate_size=ffn_dim, num_local_experts=experts, num_experts_per_tok=per_token)
        config._experts_implementation = implementation
        self.layer = MixtralSparseMoeBlock(config).to(dtype).train()
        with torch.no_grad():
            for parameter in self.layer.parameters():
                parameter.normal_(0, 0.02)
        self.gradient = torch.randn(1, tokens, dim, dtype=dtype)

    def run(self) -> float:
        self.layer.zero_grad()
        x = torch.randn_like(self.gradient, requires_grad=True)
        start = time.thread_time()
        self.layer(x).backward(self.gradient)
        return time.thread_time() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("binary", type=Path)
    parser.add_argument("--compute", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--shape", type=int, nargs=5, default=[1024, 512, 1024, 8, 2], metavar=("TOKENS", "DIM", "FFN", "EXPERTS", "PER_TOKEN"))
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--experts", default="eager", help="transformers' implementation: eager, batched_mm or grouped_mm")
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    ours = Ours(options.binary, options.shape, options.compute)
    theirs = Theirs(*options.shape, torch.bfloat16 if options.compute == "bf16" else torch.float32, options.experts)
    rows = []
    for turn in range(2 + options.turns):  # the first two warm up
        row = {"ours": ours.run("layer"), "theirs": theirs.run(), "products": ours.run("products")}
        if turn >= 2:
            rows.append(row)
    ratios = [row["theirs"] / row["ours"] for row in rows]
    shares = [row["products"] / row["ours"] for row in rows]
    print(
        json.dumps(
            {
                "ours_s": min(row["ours"] for row in rows),
                "theirs_s": min(row["theirs"] for row in rows),
                "products_s": min(row["products"] for row in rows),
                "ratio": statistics.median(ratios),
                "share_of_bound": statistics.median(shares),
            }
        )
    )


if __name__ == "__main__":
    main()
