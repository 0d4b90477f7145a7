#pragma once

#include <torch/nn/options/embedding.h>

#include "tessera/nn/module.h"

namespace tessera::nn {

using EmbeddingOptions = torch::nn::EmbeddingOptions;

/// Row look-up, as torch::nn::Embedding (padding_idx included; max_norm and sparse gradients are refused).
///   ids [...] int64
///   y   [..., D]  in the weight's dtype, or, where a compute dtype is set, fp32: the residual stream begins here
/// Backward allocates a dense gradient, V * D, in the type that the weight takes gradients up in, unless it is offered a place for it
/// (GradientDispatcher::offer_place).
class EmbeddingImpl : public Module {
 public:
  EmbeddingImpl(int64_t num_embeddings, int64_t dim) : EmbeddingImpl(EmbeddingOptions(num_embeddings, dim)) {}
  explicit EmbeddingImpl(EmbeddingOptions options);

  at::Tensor forward(const at::Tensor& ids);
  void reset_parameters();
  void pretty_print(std::ostream& stream) const override;

  EmbeddingOptions options;
  at::Tensor weight;
};
TESSERA_MODULE(Embedding);

}  // namespace tessera::nn
