#include "tessera/models/gpt2.h"

#include <torch/nn/modules/container/modulelist.h>

#include "tessera/core/error.h"
#include "tessera/kernels/consecutive.h"
#include "tessera/nn/calls.h"
#include "tessera/nn/parameter.h"
#include "tessera/nn/sample_scope.h"

namespace tessera {

Gpt2BlockImpl::Gpt2BlockImpl(const ModelConfig& config)
    : attention_norm_(norm_options(config)),
      ffn_norm_(norm_options(config)),
      attention_(config, /*bias=*/true),
      feed_forward_(config),
      attention_dropout_(config.dropout),
      ffn_dropout_(config.dropout) {
  register_module("attention_norm", attention_norm_);
  register_module("attention", attention_);
  register_module("attention_dropout", attention_dropout_);
  register_module("ffn_norm", ffn_norm_);
  register_module("feed_forward", feed_forward_);
  register_module("ffn_dropout", ffn_dropout_);
}

at::Tensor Gpt2BlockImpl::forward(const at::Tensor& x, const std::optional<at::Tensor>& positions, const std::optional<at::Tensor>& document_ids) {
  if (nn::bypassed(*this)) return nn::call(*this, x, positions, document_ids);
  const at::Tensor h = add_to_stream(x, attention_dropout_(attention_(attention_norm_(x), std::nullopt, std::nullopt, positions, document_ids)));
  return add_to_stream(h, ffn_dropout_(feed_forward_(ffn_norm_(h))));
}

Gpt2Impl::Gpt2Impl(const ModelConfig& config)
    : LanguageModel(config),
      embed_tokens_(config.vocab_size, config.dim),
      embed_positions_(config.max_seq_len.value_or(0), config.dim),
      dropout_(config.dropout),
      norm_(norm_options(config)) {
  nn::set_init(embed_tokens_->weight, nn::InitRule::normal(0, kInitStd));
  nn::set_init(embed_positions_->weight, nn::InitRule::normal(0, kInitStd));
  register_module("embed_tokens", embed_tokens_);
  register_module("embed_positions", embed_positions_);
  register_module("dropout", dropout_);
  torch::nn::ModuleList layers;
  for (int64_t i = 0; i < config.layers; ++i) layers->push_back(layers_.emplace_back(config).ptr());
  register_module("layers", layers);
  register_module("norm", norm_);
  register_head(embed_tokens_->weight);
}

at::Tensor Gpt2Impl::embed(const at::Tensor& tokens, const TokenPlaces& places) {
  require(places.positions || tokens.size(1) <= max_seq_len(), "a sequence of ", tokens.size(1), " tokens is longer than model.max_seq_len = ", max_seq_len(),
          "; raise it, or shorten the sequence");
  const at::Tensor positions = places.positions ? *places.positions : kernels::consecutive(0, tokens.size(1), tokens.device());
  return dropout_(embed_tokens_(tokens) + embed_positions_(positions));
}

at::Tensor Gpt2Impl::run_blocks(at::Tensor stream, int64_t begin, int64_t end, int64_t, const TokenPlaces& places) {
  for (int64_t i = begin; i < end; ++i) stream = layers_[static_cast<size_t>(i)](stream, places.positions, places.document_ids);
  return stream;
}

}  // namespace tessera
