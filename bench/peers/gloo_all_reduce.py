"""torch.distributed.all_reduce over Gloo, in place on fp32, timed as tessera times its own (cli/bench/sampling.h): PyTorch's own communication on CPU.

  tools/python bench/peers/gloo_all_reduce.py --ranks 2 --bytes 4096,1048576 --seconds 0.5
"""

import argparse
import json
import math
import statistics
import subprocess
import sys
import time

import torch
import torch.distributed as dist
from ranks import free_port

LEAST_SAMPLE_S = 200e-6


def slowest(mine: list[float]) -> list[float]:
    numbers = torch.tensor(mine, dtype=torch.float64)
    dist.all_reduce(numbers, op=dist.ReduceOp.MAX)
    return numbers.tolist()


def seconds_of(call, times: int) -> float:
    start = time.perf_counter()
    for _ in range(times):
        call()
    return time.perf_counter() - start


def measure(call, seconds: float) -> dict:
    """Samples of at least 200 us after a barrier each; the slowest rank's median and least."""
    seconds_of(call, 2)
    dist.barrier()
    (once,) = slowest([min(seconds_of(call, 1), seconds_of(call, 1))])
    batch = math.ceil(LEAST_SAMPLE_S / once)
    seconds_of(call, max(1, round(seconds / 5 / once)))
    samples = []
    for _ in range(max(5, round(seconds / (once * batch)))):
        dist.barrier()
        samples.append(seconds_of(call, batch) / batch)
    median, least = slowest([statistics.median(samples), min(samples)])
    return {"time_us": median * 1e6, "min_us": least * 1e6, "calls": len(samples) * batch}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--bytes", default="4096")
    parser.add_argument("--seconds", type=float, default=0.5)
    parser.add_argument("--rank", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    others = []
    if options.rank == 0:
        options.port = free_port()
        for rank in range(1, options.ranks):
            others.append(subprocess.Popen([sys.executable, *sys.argv, "--rank", str(rank), "--port", str(options.port)]))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{options.port}", rank=options.rank, world_size=options.ranks)
    for size in map(int, options.bytes.split(",")):
        tensor = torch.arange(size // 4, dtype=torch.float32) % 5 + options.rank
        dist.all_reduce(tensor)
        expected = (torch.arange(size // 4, dtype=torch.float32) % 5) * options.ranks + options.ranks * (options.ranks - 1) // 2
        if not tensor.equal(expected):
            raise SystemExit(f"all_reduce of {size} bytes: wrong sum on rank {options.rank}")
        tensor.zero_()
        row = {"op": "all_reduce", "backend": "gloo", "algorithm": "engine", "bytes": size, "ranks": options.ranks}
        row |= measure(lambda: dist.all_reduce(tensor), options.seconds)
        if options.rank == 0:
            print(json.dumps(row), flush=True)
    dist.destroy_process_group()
    for process in others:
        process.wait()


if __name__ == "__main__":
    main()
