#pragma once

#include <cstdint>

#include <ATen/core/Tensor.h>

namespace tessera::kernels {

struct AdamWStep {
  double lr = 0, beta1 = 0.9, beta2 = 0.999, eps = 1e-8, weight_decay = 0;
  int64_t step = 1;           ///< updates of this parameter, this one included
  double gradient_scale = 1;  ///< what clipping and loss scaling multiply by
};

/// AdamW (arXiv:1711.05101) in one pass on the host:
///   g = gradient_scale * gradient;  m = beta1 m + (1 - beta1) g;  v = beta2 v + (1 - beta2) g^2
///   p = (1 - lr * weight_decay) p - lr * (m / (1 - beta1^step)) / (sqrt(v / (1 - beta2^step)) + eps)
///   parameter, exp_avg, exp_avg_sq  fp32, side by side in memory without gaps
///   gradient                        fp32, bf16 or fp16, as they lie
///   copy                            bf16 or fp16, or undefined: gets the parameter, rounded to nearest. Where the parameter does not round to what lies
///                                   there, somebody has written the copy since: the parameter takes its value, and is updated from there
/// Traffic: 28 bytes an element (26 of a gradient in 16 bits), and 4 for the copy. Passes of their own that clip, compare and round take 8, 6 and 8 more.
/// An element's bits depend on its numbers alone, not on where a part of a tensor begins or on the number of threads. Nothing on meta.
void adamw_(const at::Tensor& parameter, const at::Tensor& gradient, const at::Tensor& exp_avg, const at::Tensor& exp_avg_sq, const AdamWStep& step,
            const at::Tensor& copy = {});

}  // namespace tessera::kernels
