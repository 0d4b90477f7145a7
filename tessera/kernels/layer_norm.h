#pragma once

#include <optional>
#include <utility>

#include <ATen/core/Tensor.h>

namespace tessera::kernels {

/// Layer normalisation (Ba et al., arXiv:1607.06450) over the last dimension, differentiable in all three.
///   x             [..., D]  fp32 or bf16
///   weight, bias  [D]       of one dtype, fp32 or bf16, independent of x's
///   result        [..., D]  (x - mean) / sqrt(mean((x - mean)^2) + eps) * weight + bias, in `out_dtype` (default: x's)
/// Arithmetic is fp32 whatever the dtypes; one rounding, at the end. Memory: the result; kept for backward: x, weight and two floats per row. Backward
/// allocates the gradients and 2 ceil(rows / 64) * D floats. The gradients of weight and bias sum rows in an order that depends on the number of rows alone.
/// Throws ConfigError where sizes do not fit or a dtype is not supported.
at::Tensor layer_norm(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias, double eps,
                      std::optional<at::ScalarType> out_dtype = std::nullopt);

/// A residual stream that grows and is normalized in one pass: {x + added, layer_norm of it}; as add_rms_norm (rms_norm.h).
std::pair<at::Tensor, at::Tensor> add_layer_norm(const at::Tensor& x, const at::Tensor& added, const at::Tensor& weight, const at::Tensor& bias, double eps,
                                                 std::optional<at::ScalarType> out_dtype = std::nullopt);

}  // namespace tessera::kernels
