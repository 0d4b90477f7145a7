#include <cmath>

#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/instancenorm.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>
#include <torch/nn/modules/rnn.h>

#include "tessera/nn/parameter.h"

// What libtorch's own reset_parameters would draw, as distributions: for modules that were built before anybody recorded what they do. Each can then be drawn
// for a slice alone, which the module's own function could not.

namespace tessera::nn {

namespace {

template <class... Kinds>
bool is_any(const torch::nn::Module& module) {
  return (... || (dynamic_cast<const Kinds*>(&module) != nullptr));
}

InitRule uniform_by_fan_in(int64_t fan_in) {
  const double bound = fan_in > 0 ? 1.0 / std::sqrt(static_cast<double>(fan_in)) : 0.0;
  return InitRule::uniform(-bound, bound);
}

/// Elements of `weight` that add up to one output: the second dimension times the receptive field (transposed convolutions too, as libtorch counts).
int64_t fan_in(const at::Tensor& weight) { return weight.size(0) == 0 ? 0 : weight.numel() / weight.size(0); }

template <class Embedding>
std::optional<InitRule> embedding_rule(const torch::nn::Module& module) {
  const auto* embedding = dynamic_cast<const Embedding*>(&module);
  if (!embedding) return std::nullopt;
  InitRule rule = InitRule::normal(0, 1);
  rule.zero_row = embedding->options.padding_idx();
  return rule;
}

/// Glorot's, as attention draws its projections; biases are zero, and the rows that it may add to keys and values come from the normal form.
std::optional<InitRule> attention_rule(const torch::nn::Module& module, const std::string& name) {
  const auto* attention = dynamic_cast<const torch::nn::MultiheadAttentionImpl*>(&module);
  if (!attention) return std::nullopt;
  const auto parameters = module.named_parameters(/*recurse=*/false);
  const auto* const weight = parameters.find(name);
  if (!weight || !weight->defined()) return std::nullopt;
  if (weight->dim() == 1) return InitRule::zeros();
  const int64_t field = weight->dim() == 3 ? weight->size(2) : 1;
  const double fans = static_cast<double>((weight->size(0) + weight->size(1)) * field);
  if (weight->dim() == 3) return InitRule::normal(0, std::sqrt(2 / fans));
  return InitRule::uniform(-std::sqrt(6 / fans), std::sqrt(6 / fans));
}

template <class Recurrent>
std::optional<InitRule> recurrent_rule(const torch::nn::Module& module) {
  const auto* recurrent = dynamic_cast<const Recurrent*>(&module);
  if (!recurrent) return std::nullopt;
  return uniform_by_fan_in(recurrent->options.hidden_size());
}

template <class... Kinds>
std::optional<InitRule> first_recurrent_rule(const torch::nn::Module& module) {
  std::optional<InitRule> rule;
  (... || (rule = recurrent_rule<Kinds>(module)).has_value());
  return rule;
}

}  // namespace

std::optional<InitRule> default_init(const torch::nn::Module& module, const std::string& name) {
  namespace theirs = torch::nn;  // modules of these names are ours, too
  if (is_any<theirs::LayerNormImpl, theirs::GroupNormImpl, theirs::BatchNorm1dImpl, theirs::BatchNorm2dImpl, theirs::BatchNorm3dImpl,
             theirs::InstanceNorm1dImpl, theirs::InstanceNorm2dImpl, theirs::InstanceNorm3dImpl>(module)) {
    return name == "weight" ? InitRule::ones() : InitRule::zeros();
  }
  if (is_any<theirs::LinearImpl, theirs::Conv1dImpl, theirs::Conv2dImpl, theirs::Conv3dImpl, theirs::ConvTranspose1dImpl, theirs::ConvTranspose2dImpl,
             theirs::ConvTranspose3dImpl>(module)) {
    // Kaiming's uniform distribution with a = sqrt(5) has the bound 1 / sqrt(fan in), which is the bias's too.
    for (const auto& parameter : module.named_parameters(/*recurse=*/false)) {
      if (parameter.key() == "weight") return uniform_by_fan_in(fan_in(parameter.value()));
    }
  }
  if (const auto* bilinear = dynamic_cast<const theirs::BilinearImpl*>(&module)) return uniform_by_fan_in(bilinear->options.in1_features());
  if (auto rule = embedding_rule<theirs::EmbeddingImpl>(module)) return rule;
  if (auto rule = embedding_rule<theirs::EmbeddingBagImpl>(module)) return rule;
  if (auto rule = attention_rule(module, name)) return rule;
  return first_recurrent_rule<theirs::RNNImpl, theirs::LSTMImpl, theirs::GRUImpl, theirs::RNNCellImpl, theirs::LSTMCellImpl, theirs::GRUCellImpl>(module);
}

}  // namespace tessera::nn
