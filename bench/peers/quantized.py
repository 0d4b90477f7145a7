"""NF4 weights brought back to numbers, ours beside bitsandbytes' CPU path: the least processor time of one thread for 4096 x 4096 elements, in turns, blocks of 64.
Ours come in tiles of 4 MiB, theirs in four parts, whose memory malloc keeps: page faults would cost them more than the decoding.

  tools/peer_python bench/peers/quantized.py [--rounds 5]
"""

import argparse
import json
import os
import subprocess
import time
from pathlib import Path

import torch
from bitsandbytes.functional import dequantize_4bit, quantize_4bit

ROOT = Path(__file__).resolve().parent.parent.parent


def ours(bf16: bool) -> float:
    done = subprocess.run(
        [ROOT / "build/release/bin/tessera_kernels_bench", f"--benchmark_filter=^dequantize_fused/bf16:{int(bf16)}/nf4:1/", "--benchmark_format=json",
         "--benchmark_min_time=0.1"],
        capture_output=True, text=True, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    return min(run["cpu_time"] for run in json.loads(done.stdout)["benchmarks"]) / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{'dtype':<6} {'ours, ms':>9} {'theirs, ms':>11} {'theirs / ours':>14}")
    for bf16 in (False, True):
        weight = torch.randn(1024, 4096, dtype=torch.bfloat16 if bf16 else torch.float32)
        codes, state = quantize_4bit(weight, blocksize=64, quant_type="nf4")

        def theirs() -> float:
            begin = time.process_time()
            for _ in range(4):
                dequantize_4bit(codes, state)
            return time.process_time() - begin

        turns = [(ours(bf16), min(theirs() for _ in range(5))) for _ in range(options.rounds)]
        own, other = (min(side) for side in zip(*turns))
        print(f"{'bf16' if bf16 else 'fp32':<6} {own * 1e3:9.2f} {other * 1e3:11.2f} {other / own:14.2f}", flush=True)


if __name__ == "__main__":
    main()
