#pragma once

#include <map>
#include <memory>
#include <vector>

#include <ATen/core/Tensor.h>

#include "tessera/pipeline/split/recording.h"

namespace tessera::tape {

/// The forward of one stage for one micro-batch, and what its backward needs.
///
/// What is received is cut off from the sender's graph and is a leaf here, so that its gradient can go back. A gradient that autograd does not bring, though a
/// stage expects it, is zeros.
class StagePass {
 public:
  /// `fed`: the inputs of StagePlan::fed; `received`: of StagePlan::receives. Throws ConfigError where their shapes or dtypes are not the recorded ones.
  StagePass(std::shared_ptr<const Recording> recording, int stage, const std::vector<at::Tensor>& fed, const std::vector<at::Tensor>& received);

  /// What goes out, in the order of StagePlan::sends; without a graph.
  std::vector<at::Tensor> sends() const;
  /// In the last stage, what the model gives; with its graph, so that a loss may be computed from it.
  std::vector<at::Tensor> outputs() const;

  /// Adds to the gradients of parameters. `gradients`: of sends(), in that order, undefined where Crossing::gradient is not set; in the last stage, of the
  /// outputs, or none where the backward of a loss has run already. Returns those of what was received, in the order of StagePlan::receives, undefined where
  /// none goes back. Once.
  std::vector<at::Tensor> backward(const std::vector<at::Tensor>& gradients);

 private:
  const StagePlan& plan() const { return recording_->stages.stages[static_cast<size_t>(stage_)]; }
  const Crossing& crossing(int c) const { return recording_->stages.crossings[static_cast<size_t>(c)]; }

  std::shared_ptr<const Recording> recording_;
  int stage_;
  std::vector<at::Tensor> leaves_, results_;
};

}  // namespace tessera::tape
