#pragma once

#include <vector>

#include <torch/nn/options/normalization.h>

#include "tessera/nn/module.h"

namespace tessera::nn {

using LayerNormOptions = torch::nn::LayerNormOptions;

/// (x - mean) / sqrt(variance + eps) * weight + bias over the last dimensions, as torch::nn::LayerNorm.
///   x [..., shape]   fp32 residual stream, or any float; the arithmetic is fp32, of fp64 fp64
///   y [..., shape]   in the compute dtype where one is set, else x's
/// Kept for backward: x as it is, and two numbers per row.
class LayerNormImpl : public Module {
 public:
  LayerNormImpl(std::vector<int64_t> normalized_shape) : LayerNormImpl(LayerNormOptions(std::move(normalized_shape))) {}
  explicit LayerNormImpl(LayerNormOptions options);

  at::Tensor forward(const at::Tensor& x);
  void reset_parameters();
  void pretty_print(std::ostream& stream) const override;

  LayerNormOptions options;
  at::Tensor weight, bias;
};
TESSERA_MODULE(LayerNorm);

/// x * weight / sqrt(mean(x^2) + eps) over the last dimension (arXiv:1910.07467); dtypes as LayerNorm, but for fp64 (kernels/rms_norm.h).
class RMSNormImpl : public Module {
 public:
  explicit RMSNormImpl(int64_t dim, double eps = 1e-5);

  at::Tensor forward(const at::Tensor& x);
  void reset_parameters();
  void pretty_print(std::ostream& stream) const override;

  double eps;
  at::Tensor weight;
};
TESSERA_MODULE(RMSNorm);

}  // namespace tessera::nn
