#pragma once

#include <memory>
#include <string>
#include <vector>

#include <torch/nn/module.h>

#include "tessera/comm/group.h"
#include "tessera/core/attachment.h"
#include "tessera/nn/parameter.h"

namespace tessera::precision {

/// Finds where a step stops being finite. While it lives, the outputs of all interceptable modules below `root` and all gradients, as they arrive and before
/// they are summed over ranks, are looked at, and the first that holds an infinity or a NaN is kept: run the step's passes again under it. That costs a pass
/// over every tensor and a wait for each, so it is for steps whose norm has already shown that something is wrong.
class NonFiniteWatch {
 public:
  NonFiniteWatch(torch::nn::Module& root, const std::vector<nn::NamedParameter>& parameters);
  ~NonFiniteWatch();
  NonFiniteWatch(const NonFiniteWatch&) = delete;
  NonFiniteWatch& operator=(const NonFiniteWatch&) = delete;

  /// "the output of 'layers.3.feed_forward'", "the gradient of 'layers.3.feed_forward.w1.weight'"; empty where all was finite.
  const std::string& found() const;

 private:
  struct State;
  std::shared_ptr<State> state_;
  Attachment attached_;
};

/// What every rank of `group` found, in one sentence: "on rank 1 the output of ... is the first that is not finite", once for each rank that found something.
/// Where none did, says so: the values were lost in the sum over ranks, or by a machine that does not compute the same twice. Collective: one all-gather of
/// 256 bytes a rank.
std::string describe_non_finite(const NonFiniteWatch& watch, const comm::Group& group);

}  // namespace tessera::precision
