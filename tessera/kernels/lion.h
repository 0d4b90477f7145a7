#pragma once

#include <ATen/core/Tensor.h>

namespace tessera::kernels {

struct LionStep {
  double lr = 0, beta1 = 0.9, beta2 = 0.99, weight_decay = 0;
};

/// One update by Lion (arXiv:2302.06675), in place; all three of one shape, dense, with the same strides:
///   p -= lr * weight_decay * p;  p -= lr * sign(beta1 m + (1 - beta1) g);  m = beta2 m + (1 - beta2) g
/// Traffic: 20 bytes an fp32 element, one pass on a CPU. The bits of an element do not depend on those beside it. Elsewhere, and of other dtypes, operators of
/// libtorch, with an average's bytes of up to 33 million elements for the while. Works on meta.
void lion_(const at::Tensor& parameter, const at::Tensor& gradient, const at::Tensor& exp_avg, const LionStep& step);

}  // namespace tessera::kernels
