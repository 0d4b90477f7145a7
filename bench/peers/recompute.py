"""What recomputing every block costs the peer: Hugging Face LLaMA on eager PyTorch with torch.utils.checkpoint(use_reentrant=False), two sequences, one thread.

A pass (forward and backward) with it alternates with one without, as in bench/train/recompute_bench.cpp, whose numbers these lie beside: processor time of
the quickest pass of each kind, and the most bytes alive during a pass beyond parameters and gradients. Prints one line of JSON.

  tools/peer_python bench/peers/recompute.py recipes/bench_matmul.toml --compute bf16
"""

import argparse
import json
import time
from pathlib import Path

import torch
from llama import LlamaLoss
from memory import peak_bytes
from recipe import read_recipe


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", type=Path)
    parser.add_argument("--compute", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--passes", type=int, default=6, help="of each kind")
    options = parser.parse_args()
    recipe = read_recipe(options.recipe)
    torch.manual_seed(0)
    torch.set_num_threads(1)
    module = LlamaLoss(recipe, "whole")
    for parameter in module.parameters():
        parameter.grad = torch.zeros_like(parameter)
    tokens = torch.randint(recipe.vocab_size, (2, recipe.seq_len))

    def once() -> float:
        start = time.thread_time()
        with torch.autocast("cpu", torch.bfloat16, enabled=options.compute == "bf16"):
            loss = module(tokens, tokens)
        loss.backward()
        return time.thread_time() - start

    seconds = {"plain": [], "recompute": []}
    peak = {}
    for turn in range(1 + options.passes):  # the first one warms up
        for kind in seconds:
            module.recompute_blocks(kind == "recompute")
            if turn > 0:
                seconds[kind].append(once())
            else:
                peak[kind] = peak_bytes(0, once)
    plain, again = (min(times) for times in seconds.values())
    print(json.dumps({"plain_s": plain, "recompute_s": again, "time_more": again / plain - 1, "peak_bytes": peak}))


if __name__ == "__main__":
    main()
