#pragma once

#include <ATen/core/Tensor.h>

namespace tessera::kernels {

/// Labels with this value count for nothing, as in PyTorch.
inline constexpr int64_t kIgnoredLabel = -100;

/// Sum over valid tokens of the cross-entropy of logits that exist already; differentiable in `logits`.
///   logits  [T, V]  fp32 or bf16
///   labels  [T]     int64 in [0, V), or -100
///   result  []      fp32; divide by the global count of valid tokens, once, outside
/// The sum runs over rows in a fixed tree, the same for any number of threads. An out-of-range label throws ConfigError (CPU).
/// Memory: T floats; kept for backward: logits, labels and the T log-sum-exps. Backward allocates the gradient, T * V of logits' dtype, and nothing else.
at::Tensor cross_entropy_sum(const at::Tensor& logits, const at::Tensor& labels);

}  // namespace tessera::kernels
