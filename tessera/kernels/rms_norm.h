#pragma once

#include <optional>
#include <utility>

#include <ATen/core/Tensor.h>

namespace tessera::kernels {

/// Root mean square layer normalisation (Zhang and Sennrich, arXiv:1910.07467), differentiable in `x` and `weight`.
///   x       [..., D]  fp32 or bf16
///   weight  [D]       fp32 or bf16, independent of x's dtype
///   result  [..., D]  x * weight / sqrt(mean(x^2) + eps), in `out_dtype` (default: x's)
/// Arithmetic is fp32 whatever the dtypes; one rounding, at the end. With an fp32 residual stream and bf16 products, `out_dtype = kBFloat16` saves the cast.
/// Memory: the result; kept for backward: x, weight and one float per row. Backward allocates both gradients and ceil(rows / 64) * D floats.
/// The gradient of `weight` sums rows in an order that depends on the number of rows alone, never on the number of threads.
/// Throws ConfigError where weight's size is not D or a dtype is not supported.
at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& weight, double eps, std::optional<at::ScalarType> out_dtype = std::nullopt);

/// A residual stream that grows and is normalized in one pass: {x + added, rms_norm of it}; differentiable in all three. The sum has x's dtype and is rounded
/// once; `added` may have another. Traffic: reads 2, writes 2 tensors, and backward 3 and 1, where the two operators take 3 + 2 and 5 + 2.
/// Memory: the two results; kept for backward: the sum, weight and one float per row.
std::pair<at::Tensor, at::Tensor> add_rms_norm(const at::Tensor& x, const at::Tensor& added, const at::Tensor& weight, double eps,
                                               std::optional<at::ScalarType> out_dtype = std::nullopt);

}  // namespace tessera::kernels
