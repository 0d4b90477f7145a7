#pragma once

#include <ATen/core/Tensor.h>

#include "tessera/kernels/activation.h"

namespace tessera::kernels {

/// activation(x + bias), differentiable in both: of a product that left its bias out.
///   x     [..., F]  fp32 or bf16
///   bias  [F]       fp32 or bf16, independent of x's dtype
/// Arithmetic in fp32, rounded once. Memory: the result; kept for backward: x and bias. Backward reads two tensors and writes one, sums the bias' gradient in
/// the same pass, in an order that depends on the number of rows alone, and allocates ceil(rows / 64) * F floats.
/// Throws ConfigError where sizes do not fit.
at::Tensor bias_activation(const at::Tensor& x, const at::Tensor& bias, Activation activation);

/// activation(x) by the same loops, of a product that has its bias already. On a CPU a third of libtorch's time for GELU; of types that have no fused kernel,
/// and on CUDA, that is libtorch's. Kept for backward: x.
at::Tensor activate(const at::Tensor& x, Activation activation);

}  // namespace tessera::kernels
