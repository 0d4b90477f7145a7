#pragma once

#include <ATen/core/Tensor.h>

namespace tessera::nn {

/// `carrier` with a loss beside it, of which the gradient is `weight` times its own: a layer in the midst of a model, maybe in a stage that never sees the
/// loss, adds a term to what is minimized, and no output has to be handed on to the end. Values are not changed.
///   loss  fp32 []
/// Memory: none. The term's gradient is computed when that of `carrier` is asked for.
at::Tensor with_auxiliary_loss(const at::Tensor& carrier, const at::Tensor& loss, double weight);

/// What the mean over this micro-batch's tokens of an auxiliary term counts in what the step minimizes, the mean over all its tokens: the share of the step's
/// valid tokens that are here, times the scale of the loss. So it does not matter how micro-batches are dealt over ranks. By SampleScope; outside of one, as
/// in a plain loop whose loss is a sum over tokens, `tokens`.
double share_of_step(int64_t tokens);

}  // namespace tessera::nn
