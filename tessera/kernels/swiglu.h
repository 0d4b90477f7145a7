#pragma once

#include <ATen/core/Tensor.h>

namespace tessera::kernels {

/// The gate of a SwiGLU feed-forward block (Shazeer, arXiv:2002.05202): silu(gate) * up, with silu(g) = g / (1 + exp(-g)); differentiable in both.
///   gate, up  [..., F]  same shape and dtype, fp32 or bf16; rows may be strided (the two halves of one packed product are not copied)
///   result    [..., F]  contiguous, same dtype; arithmetic in fp32, rounded once
/// Memory: the result; kept for backward: the two inputs alone. Backward reads three tensors and writes two in one pass.
/// Throws ConfigError where shapes or dtypes differ.
at::Tensor swiglu(const at::Tensor& gate, const at::Tensor& up);

/// The same of a GEGLU block: gelu(gate) * up, GELU in its tanh form.
at::Tensor geglu(const at::Tensor& gate, const at::Tensor& up);

}  // namespace tessera::kernels
