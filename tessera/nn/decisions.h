#pragma once

#include <functional>

#include <ATen/core/Tensor.h>

#include "tessera/nn/noted.h"

namespace tessera::nn {

/// What a forward pass decides by comparing numbers, as a router chooses experts. Made again, on a device whose sums have no fixed order, the numbers may
/// differ by a rounding and the decision altogether; so a pass that is made again is given the first one's.
class Decisions : public Noted<at::Tensor> {
 public:
  /// What this pass decides. The tensor must not be written to.
  static at::Tensor make(const std::function<at::Tensor()>& decide) { return next(decide); }
};

}  // namespace tessera::nn
