#pragma once

#include <ATen/core/Tensor.h>

namespace tessera::kernels {

/// Where a gradient is to end up, for whoever computes it.
struct GradientPlace {
  at::Tensor memory{};     ///< undefined: nowhere in particular
  bool holds_sum = false;  ///< of gradients to which this one is added; otherwise what lies there is overwritten

  bool defined() const { return memory.defined(); }
};

}  // namespace tessera::kernels
