#pragma once

#include <torch/nn/options/linear.h>

#include "tessera/nn/module.h"

namespace tessera::nn {

using LinearOptions = torch::nn::LinearOptions;

/// y = x weight^T + bias, as torch::nn::Linear: same options, parameter names, shapes and initial distribution.
///   x [..., I]   any dtype; cast to the compute dtype where it has another
///   y [..., O]   in the compute dtype
/// `weight` [O, I] and `bias` [O] stay in their own dtype: they are cast once per call, and autograd casts their gradients back.
/// Kept for backward: x and the cast weight.
class LinearImpl : public Module {
 public:
  LinearImpl(int64_t in_features, int64_t out_features) : LinearImpl(LinearOptions(in_features, out_features)) {}
  explicit LinearImpl(const LinearOptions& options);

  at::Tensor forward(const at::Tensor& x);
  void reset_parameters();  ///< draws again from libtorch's generator, as a plain torch::nn::Linear does
  void pretty_print(std::ostream& stream) const override;

  LinearOptions options;
  at::Tensor weight, bias;
};
TESSERA_MODULE(Linear);

/// `tensor` in `dtype`, differentiable; itself where it has that dtype or no dtype is asked for.
at::Tensor cast(const at::Tensor& tensor, std::optional<at::ScalarType> dtype);

}  // namespace tessera::nn
