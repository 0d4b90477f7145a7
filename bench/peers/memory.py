"""Peak of the bytes that the CPU allocator hands out during a step: the peer's equivalent of tessera's tracked peak."""

import resource

import torch
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile


def live_bytes(*groups) -> int:
    """Bytes of the distinct storages behind the given tensors: what lives before the step starts."""
    storages = {}
    for group in groups:
        for tensor in group:
            storage = (tensor.to_local() if isinstance(tensor, DTensor) else tensor).untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def peak_bytes(live_before: int, step) -> int:
    """Runs `step` once under the profiler and replays its allocations and frees in order, starting from what lived before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    current = peak = live_before
    for event in sorted(events, key=lambda event: event.start_ns()):
        current += event.nbytes()
        peak = max(peak, current)
    return peak


def resident_bytes() -> int:
    """Peak resident memory of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def optimizer_tensors(optimizer: torch.optim.Optimizer):
    for state in optimizer.state.values():
        yield from (value for value in state.values() if isinstance(value, torch.Tensor))
