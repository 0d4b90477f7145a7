#pragma once

#include <ATen/core/Tensor.h>

#include "tessera/kernels/loss_terms.h"

namespace tessera::kernels {

/// Labels with this value count for nothing, as in PyTorch.
inline constexpr int64_t kIgnoredLabel = -100;

/// What a token's loss is beside -log p(label). 0: the plain cross-entropy, at its cost.
struct CrossEntropyOptions {
  /// eps: the target is (1 - eps) at the label and eps / V on every entry (arXiv:1512.00567), as in torch.nn.functional.cross_entropy. From 0 to 1.
  double label_smoothing = 0;
  /// z: z * log(sum exp(logits))^2 is added, so that logits do not drift (arXiv:2204.02311).
  double z_loss = 0;
};

/// `options` as the inner loops take them, of a vocabulary of `entries`. Throws ConfigError where they are out of range.
LossTerms loss_terms(const CrossEntropyOptions& options, int64_t entries);

/// Sum over valid tokens of the cross-entropy of logits that exist already; differentiable in `logits`.
///   logits  [T, V]  fp32 or bf16
///   labels  [T]     int64 in [0, V), or -100
///   result  []      fp32; divide by the global count of valid tokens, once, outside
/// The sum runs over rows in a fixed tree, the same for any number of threads. An out-of-range label throws ConfigError (CPU).
/// Memory: T floats; kept for backward: logits, labels and the T log-sum-exps. Backward allocates the gradient, T * V of logits' dtype, and nothing else.
/// Label smoothing reads a row once more while it is in cache; z-loss is a few numbers a row.
at::Tensor cross_entropy_sum(const at::Tensor& logits, const at::Tensor& labels, const CrossEntropyOptions& options = {});

}  // namespace tessera::kernels
