"""Attention over ranks in plain PyTorch: keys and values are all-gathered over Gloo, then its own attention with the mask of the rank's queries.

Forward and backward of one core, causal, processes with one thread each; the quickest of some rounds. Beside `tessera bench cp`.
Prints one line of JSON.

  tools/peer_python bench/peers/ring_attention.py --length 8192 --ranks 2
"""

import argparse
import json
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from ranks import free_port
from torch.distributed._functional_collectives import all_gather_single_autograd


def measure(rank: int, options: argparse.Namespace, port: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=options.ranks)
    own = options.length // options.ranks
    dtype = torch.bfloat16 if options.dtype == "bf16" else torch.float32
    q, k, v, gradient = (torch.randn(1, heads, own, 64, dtype=dtype) for heads in (options.heads, options.kv_heads, options.kv_heads, options.heads))
    mask = torch.arange(options.length) <= torch.arange(rank * own, (rank + 1) * own).unsqueeze(1)
    best = float("inf")
    for turn in range(1 + options.rounds):  # the first one warms up
        leaves = [tensor.clone().requires_grad_() for tensor in (q, k, v)]
        dist.barrier()
        start = time.perf_counter()
        keys, values = (all_gather_single_autograd(tensor, 2, dist.group.WORLD) for tensor in leaves[1:])
        out = torch.nn.functional.scaled_dot_product_attention(leaves[0], keys, values, attn_mask=mask, enable_gqa=options.heads != options.kv_heads)
        out.backward(gradient)
        dist.barrier()
        if turn > 0:
            best = min(best, time.perf_counter() - start)
    if rank == 0:
        print(json.dumps({"length": options.length, "ranks": options.ranks, "dtype": options.dtype, "time_ms": best * 1e3}))
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=8192)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    mp.spawn(measure, (options, free_port()), options.ranks)


if __name__ == "__main__":
    main()
