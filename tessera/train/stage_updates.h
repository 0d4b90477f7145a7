#pragma once

#include <ATen/core/Tensor.h>

#include "tessera/train/compose.h"

namespace tessera {

/// The updates that a stage makes by itself in the midst of a step, and what is known of them when it ends. Nothing is clipped: the norm over all stages is
/// known when each has updated.
class StageUpdates {
 public:
  explicit StageUpdates(Composition& run) : run_(run) {}

  /// The gradients of an update have met over the data ranks. Collective over the ranks that layers are cut over; a tied weight's term leaves for the other end.
  void met();
  /// Of the parameters from their grad(), in the order of met(). A tied weight's gradient waits for the other end's term.
  void update(double lr);

  /// The root mean square of the norms, over all stages, of the gradients that were applied since the last call: fp64 [] on `device`. Collective.
  at::Tensor norm(at::Device device);

 private:
  Composition& run_;
  at::Tensor squares_;  ///< of this rank's elements, fp64 []
  int64_t updates_ = 0;
};

}  // namespace tessera
