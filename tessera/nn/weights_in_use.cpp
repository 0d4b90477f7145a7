#include "tessera/nn/weights_in_use.h"

#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>

#include "tessera/nn/embedding.h"
#include "tessera/nn/head.h"
#include "tessera/nn/linear.h"

namespace tessera::nn {
namespace {

template <class... Layers>
void add_weight(const torch::nn::Module& module, std::vector<at::Tensor>& weights) {
  const auto add = [&](const auto* layer) {
    if (layer != nullptr && layer->weight.defined()) weights.push_back(layer->weight);
  };
  (add(dynamic_cast<const Layers*>(&module)), ...);
}

}  // namespace

std::vector<at::Tensor> weights_in_use(const torch::nn::Module& module) {
  std::vector<at::Tensor> weights;
  for (const at::Tensor& parameter : module.parameters(/*recurse=*/false)) {
    if (parameter.defined()) weights.push_back(parameter);
  }
  add_weight<torch::nn::LinearImpl, LinearImpl, torch::nn::EmbeddingImpl, EmbeddingImpl, LanguageModelHeadImpl>(module, weights);
  return weights;
}

}  // namespace tessera::nn
