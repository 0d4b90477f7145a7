#pragma once

#include <ATen/core/Tensor.h>

/// What data-parallel techniques share. Not part of the public surface.
namespace tessera {

/// Takes gradients away from the device while a step brings them, and adds up what comes for the same tensor: a parameter, whose micro-batches' gradients are
/// of this rank alone, or what is updated of it, whose are summed over ranks. The technique then has no memory for gradients but that of the buckets at hand.
class GradientRelay {
 public:
  virtual ~GradientRelay() = default;

  /// Adds `gradient` to what is kept for `tensor`. The memory of `gradient` may be let go of when this returns; it is not to be written.
  virtual void keep(const at::Tensor& tensor, const at::Tensor& gradient) = 0;

  /// Adds what is kept for `tensor`, if anything is, to `sum` on the device, and keeps it no longer.
  virtual void add_kept(const at::Tensor& tensor, const at::Tensor& sum) = 0;
};

}  // namespace tessera
