#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include "tessera/core/attachment.h"
#include "tessera/verify/outputs.h"

namespace tessera {

/// What a router chose for the tokens of a micro-batch, or those of them that a rank has.
struct RecordedChoice {
  at::Tensor chosen;     ///< [rows * columns, K]
  at::Tensor positions;  ///< [columns]: where these lie in their samples; undefined: they are all here
};

/// What the routers of one rank chose in a step, by the call.
using RecordedChoices = std::map<OutputKey, RecordedChoice>;

/// Takes down what every nn::RouterChoice below `root` chooses for `samples`, of which a micro-batch has `rows`, until what is returned dies; `choices` must
/// live as long.
[[nodiscard]] Attachment record_choices(torch::nn::Module& root, SampleRange samples, int64_t rows, RecordedChoices& choices);

/// Lets every nn::RouterChoice below `root` choose what the ranks chose for the same micro-batch, and counts in `compared` what it would have chosen itself.
/// Rounding decides between experts whose scores are as good as equal, and from there on a token is computed by other weights: nothing could be compared. That
/// nothing else decides is what RoutingComparison::within() tells.
[[nodiscard]] Attachment replay_choices(torch::nn::Module& root, SampleRange samples, std::vector<RecordedChoices*> ranks, RoutingComparison& compared);

}  // namespace tessera
