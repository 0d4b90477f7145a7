#pragma once

#include <ATen/core/Tensor.h>

namespace tessera::nn {

/// `carrier` with a loss beside it, of which the gradient is `weight` times its own: a layer in the midst of a model, maybe in a stage that never sees the
/// loss, adds a term to what is minimized, and no output has to be handed on to the end. Values are not changed.
///   loss  fp32 []
/// Memory: none. The term's gradient is computed when that of `carrier` is asked for.
at::Tensor with_auxiliary_loss(const at::Tensor& carrier, const at::Tensor& loss, double weight);

}  // namespace tessera::nn
