#include "tessera/models/llama.h"

#include <torch/nn/modules/container/modulelist.h>

#include "tessera/nn/calls.h"
#include "tessera/nn/parameter.h"

namespace tessera {

LlamaBlockImpl::LlamaBlockImpl(const ModelConfig& config)
    : attention_norm_(config.dim, config.norm_eps),
      ffn_norm_(config.dim, config.norm_eps),
      attention_(config, /*bias=*/false),
      attention_dropout_(config.dropout),
      ffn_dropout_(config.dropout) {
  register_module("attention_norm", attention_norm_);
  register_module("attention", attention_);
  register_module("attention_dropout", attention_dropout_);
  register_module("ffn_norm", ffn_norm_);
  if (config.experts > 0) {
    mixture_ = register_module("feed_forward", MixtureFeedForward(config));
  } else {
    feed_forward_ = register_module("feed_forward", GatedFeedForward(config));
  }
  register_module("ffn_dropout", ffn_dropout_);
}

at::Tensor LlamaBlockImpl::forward(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin, const std::optional<at::Tensor>& positions,
                                   const std::optional<at::Tensor>& document_ids) {
  if (nn::bypassed(*this)) return nn::call(*this, x, cos, sin, positions, document_ids);
  const at::Tensor h = add_to_stream(x, attention_dropout_(attention_(attention_norm_(x), cos, sin, positions, document_ids)));
  const at::Tensor normed = ffn_norm_(h);
  return add_to_stream(h, ffn_dropout_(mixture_ ? mixture_(normed) : feed_forward_(normed)));
}

LlamaImpl::LlamaImpl(const ModelConfig& config)
    : LanguageModel(config),
      embed_tokens_(config.vocab_size, config.dim),
      rotary_(head_dim(config), config.max_seq_len.value_or(0), config.rope_theta),
      dropout_(config.dropout),
      norm_(config.dim, config.norm_eps) {
  nn::set_init(embed_tokens_->weight, nn::InitRule::normal(0, kInitStd));
  register_module("embed_tokens", embed_tokens_);
  register_module("rotary", rotary_);
  register_module("dropout", dropout_);
  torch::nn::ModuleList layers;
  for (int64_t i = 0; i < config.layers; ++i) layers->push_back(layers_.emplace_back(config).ptr());
  register_module("layers", layers);
  register_module("norm", norm_);
  register_head(embed_tokens_->weight);
}

at::Tensor LlamaImpl::embed(const at::Tensor& tokens, const TokenPlaces&) { return dropout_(embed_tokens_(tokens)); }

at::Tensor LlamaImpl::run_blocks(at::Tensor stream, int64_t begin, int64_t end, int64_t seq_len, const TokenPlaces& places) {
  const auto [cos, sin] = rotary_(seq_len, places.positions, stream.device());
  for (int64_t i = begin; i < end; ++i) stream = layers_[static_cast<size_t>(i)](stream, cos, sin, places.positions, places.document_ids);
  return stream;
}

}  // namespace tessera
