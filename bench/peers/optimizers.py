"""Steps of others' optimizers on the parameters that bench/optim has, a LLaMA's of 35 million: PyTorch's fused AdamW, Adafactor and Muon, lion-pytorch, bitsandbytes' CPU path, DeepSpeed's
AdamW of the host (ZeRO-Offload's), which ninja compiles the first time. `adamw_clip` multiplies the gradients by a factor first, as clipping does; `masters` updates fp32 masters of bf16
weights from bf16 gradients, and casts; `masters_clip` does both.

Commands come on stdin, as peer.py's: `step N` is answered with {"step_s": [...]}, processor time on one thread.

  tools/peer_python bench/peers/optimizers.py lion <<< $'step 5\\nquit'
"""

import argparse
import json
import sys
import time

import torch


def shapes() -> list[tuple[int, ...]]:
    layer = [(384, 384)] * 4 + [(1024, 384)] * 2 + [(384, 1024), (384,), (384,)]
    return [(32000, 384), (32000, 384), (384,)] + 6 * layer


def make(name: str, parameters: list[torch.nn.Parameter]) -> list[torch.optim.Optimizer]:
    if name.endswith("_clip"):
        return [Scaled(parameters, make(name.removesuffix("_clip"), parameters)[0])]
    if name == "masters":
        return [Masters(parameters)]
    if name == "adamw":
        return [torch.optim.AdamW(parameters, lr=1e-4, fused=True)]
    if name == "deepspeed":
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        return [DeepSpeedCPUAdam(parameters, lr=1e-4, weight_decay=0.01)]
    if name == "lion":
        from lion_pytorch import Lion

        return [Lion(parameters, lr=1e-4, weight_decay=0.01)]
    if name == "adafactor":
        return [torch.optim.Adafactor(parameters, lr=1e-4, weight_decay=0.01)]
    if name == "adam8bit":
        from bitsandbytes.optim import AdamW8bit

        return [AdamW8bit(parameters[1:], lr=1e-4), torch.optim.AdamW(parameters[:1], lr=1e-4, fused=True)]
    hidden = [p for p in parameters[2:] if p.dim() == 2]
    rest = parameters[:2] + [p for p in parameters[2:] if p.dim() != 2]
    return [torch.optim.Muon(hidden, lr=1e-4, adjust_lr_fn="match_rms_adamw"), torch.optim.AdamW(rest, lr=1e-4, fused=True)]


class Masters:
    """PyTorch's fused AdamW on fp32 masters of bf16 parameters."""

    def __init__(self, parameters: list[torch.nn.Parameter]):
        self.weights = parameters
        self.masters = [torch.nn.Parameter(parameter.detach().float()) for parameter in parameters]
        for master in self.masters:
            master.grad = torch.zeros_like(master)
        self.optimizer = torch.optim.AdamW(self.masters, lr=1e-4, fused=True)

    @torch.no_grad()
    def step(self) -> None:
        torch._foreach_copy_([master.grad for master in self.masters], [weight.grad for weight in self.weights])
        self.optimizer.step()
        torch._foreach_copy_(self.weights, self.masters)


class Scaled:
    """Gradients are multiplied by a factor that is not one before a step is made."""

    def __init__(self, parameters: list[torch.nn.Parameter], inside):
        self.parameters, self.inside = parameters, inside

    @torch.no_grad()
    def step(self) -> None:
        torch._foreach_mul_([parameter.grad for parameter in self.parameters], torch.tensor(0.999))
        self.inside.step()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=["adamw", "adamw_clip", "masters", "masters_clip", "deepspeed", "lion", "adafactor", "adam8bit", "muon"])
    options = parser.parse_args()
    torch.set_num_threads(1)
    dtype = torch.bfloat16 if options.name.startswith("masters") else torch.float32
    parameters = [torch.nn.Parameter(torch.randn(shape).to(dtype)) for shape in shapes()]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    optimizers = make(options.name, parameters)
    for line in sys.stdin:
        command, *count = line.split()
        if command == "quit":
            return
        seconds = []
        for _ in range(int(count[0])):
            begin = time.process_time()
            for optimizer in optimizers:
                optimizer.step()
            seconds.append(time.process_time() - begin)
        print(json.dumps({"step_s": seconds}), flush=True)


if __name__ == "__main__":
    main()
