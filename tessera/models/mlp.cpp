#include "tessera/models/mlp.h"

#include <torch/nn/modules/container/modulelist.h>

#include "tessera/nn/calls.h"
#include "tessera/nn/parameter.h"

namespace tessera {

MlpBlockImpl::MlpBlockImpl(const ModelConfig& config) : ffn_norm_(norm_options(config)), feed_forward_(config), ffn_dropout_(config.dropout) {
  register_module("ffn_norm", ffn_norm_);
  register_module("feed_forward", feed_forward_);
  register_module("ffn_dropout", ffn_dropout_);
}

at::Tensor MlpBlockImpl::forward(const at::Tensor& x) {
  if (nn::bypassed(*this)) return nn::call(*this, x);
  return add_to_stream(x, ffn_dropout_(feed_forward_(ffn_norm_(x))));
}

MlpImpl::MlpImpl(const ModelConfig& config) : LanguageModel(config), embed_tokens_(config.vocab_size, config.dim), norm_(norm_options(config)) {
  nn::set_init(embed_tokens_->weight, nn::InitRule::normal(0, kInitStd));
  register_module("embed_tokens", embed_tokens_);
  torch::nn::ModuleList layers;
  for (int64_t i = 0; i < config.layers; ++i) layers->push_back(layers_.emplace_back(config).ptr());
  register_module("layers", layers);
  register_module("norm", norm_);
  register_head(embed_tokens_->weight);
}

at::Tensor MlpImpl::embed(const at::Tensor& tokens, const TokenPlaces&) { return embed_tokens_(tokens); }

at::Tensor MlpImpl::run_blocks(at::Tensor stream, int64_t begin, int64_t end, int64_t, const TokenPlaces&) {
  for (int64_t i = begin; i < end; ++i) stream = layers_[static_cast<size_t>(i)](stream);
  return stream;
}

}  // namespace tessera
