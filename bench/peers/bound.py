"""The bound of a training step: its matrix products alone, in the same shapes, type and number of threads, with preallocated results, by the faster of the two
libraries that torch brings along: what its operators take (MKL), and oneDNN, which on processors of other makers than Intel is faster in fp32.

No implementation on these libraries and this machine is faster than its products, so each side's share of this bound says how much there is left to gain.
"""

import ctypes
import dataclasses
import time
from collections import Counter
from pathlib import Path

import torch
from recipe import Recipe


def linear_shapes(recipe: Recipe, cut: int = 1) -> Counter:
    """(in features, out features) of every linear layer and of the head, with how often each occurs. The embedding look-up is no product. `cut`: of the first
    of so many ranks that every layer is cut over, column-wise or row-wise."""
    kv_dim = recipe.dim // recipe.heads * recipe.kv_heads
    dim, ffn_dim, vocab_size = (-(-size // cut) for size in (recipe.dim, recipe.ffn_dim, recipe.vocab_size))
    shapes = Counter()
    shapes[recipe.dim, dim] += recipe.layers
    shapes[dim, recipe.dim] += recipe.layers
    shapes[recipe.dim, -(-kv_dim // cut)] += 2 * recipe.layers
    shapes[recipe.dim, ffn_dim] += 2 * recipe.layers
    shapes[ffn_dim, recipe.dim] += recipe.layers
    if vocab_size:
        shapes[recipe.dim, vocab_size] += 1
    return shapes


def _seconds(product, repeats: int = 3) -> float:
    """Median of `repeats` runs after one that warms up."""
    times = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        product()
        times.append(time.perf_counter() - start)
    return sorted(times[1:])[repeats // 2]


def _one_dnn():
    """at::native::mkldnn_matmul, which torch has no operator for in fp32: f(left, right, out). None where it is missing,
    or refuses this processor (it asks for what 16-bit products need, in fp32, too)."""
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
    function = getattr(library, "_ZN2at6native13mkldnn_matmulERKNS_6TensorES3_S3_ff", None)
    if function is None or not torch.backends.mkldnn.is_available() or not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return None
    function.argtypes = [ctypes.c_void_p] * 3 + [ctypes.c_float] * 2
    function.restype = None

    def multiply(*tensors):
        handles = [ctypes.c_void_p(tensor._cdata) for tensor in tensors]  # a tensor of C++ is this pointer
        function(*(ctypes.addressof(handle) for handle in handles), 0.0, 1.0)

    return multiply


def _product_seconds(left: torch.Tensor, right: torch.Tensor, out: torch.Tensor) -> float:
    seconds = _seconds(lambda: torch.mm(left, right, out=out))
    one_dnn = _one_dnn() if out.dtype == torch.float32 else None  # narrower ones are oneDNN's in any case
    return min(seconds, _seconds(lambda: one_dnn(left, right, out))) if one_dnn else seconds


def _random(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.randn(shape).to(dtype)


def linear_seconds(recipe: Recipe, sequences: int, dtype: torch.dtype, cut: int) -> float:
    """Forward, gradient of the input and gradient of the weight of every linear layer, for `sequences` sequences."""
    tokens = sequences * recipe.seq_len
    total = 0.0
    for (fan_in, fan_out), count in linear_shapes(recipe, cut).items():
        x, w, dy = _random(dtype, tokens, fan_in), _random(dtype, fan_out, fan_in), _random(dtype, tokens, fan_out)
        y, dx, dw = torch.empty_like(dy), torch.empty_like(x), torch.empty_like(w)
        total += count * (_product_seconds(x, w.t(), y) + _product_seconds(dy, w, dx) + _product_seconds(dy.t(), x, dw))
    return total


def attention_seconds(recipe: Recipe, sequences: int, dtype: torch.dtype, cut: int) -> float:
    """Attention's products as full squares: two forward (q k^T, p v) and five backward (p again, dv, dp, dq, dk). A causal kernel needs about half of them."""
    head_dim = recipe.dim // recipe.heads
    batch = sequences * -(-recipe.heads // cut)
    q, k = _random(dtype, batch, recipe.seq_len, head_dim), _random(dtype, batch, recipe.seq_len, head_dim)
    p = torch.empty(batch, recipe.seq_len, recipe.seq_len, dtype=dtype)
    out = torch.empty_like(q)
    outer = _seconds(lambda: torch.bmm(q, k.transpose(1, 2), out=p))
    inner = _seconds(lambda: torch.bmm(p, k, out=out))
    return recipe.layers * (3 * outer + 4 * inner)


def measure_stage_bound(recipe: Recipe, micro_batches: int, dtype: torch.dtype, layers: int, has_head: bool) -> dict:
    """The same of a stage of a pipeline, whose products see one sequence at a time."""
    stage = dataclasses.replace(recipe, layers=layers, vocab_size=recipe.vocab_size if has_head else 0)
    once = measure_bound(stage, 1, dtype)
    return {name: micro_batches * seconds for name, seconds in once.items()}


def measure_bound(recipe: Recipe, sequences: int, dtype: torch.dtype, cut: int = 1) -> dict:
    """Seconds per step of a rank that holds `sequences` sequences, and its part of layers that are cut over `cut` ranks."""
    return {"products_s": linear_seconds(recipe, sequences, dtype, cut), "attention_products_s": attention_seconds(recipe, sequences, dtype, cut)}
