#pragma once

#include <vector>

#include "tessera/models/blocks.h"
#include "tessera/models/mixture.h"
#include "tessera/models/model.h"
#include "tessera/nn/embedding.h"
#include "tessera/nn/norm.h"
#include "tessera/nn/rotary.h"

namespace tessera {

/// h = x + attention(attention_norm(x)); h + feed_forward(ffn_norm(h)). x [B, S, D]; cos, sin [S, D/H/2]. With model.experts the feed-forward layer is a
/// mixture of experts.
class LlamaBlockImpl : public nn::Module {
 public:
  explicit LlamaBlockImpl(const ModelConfig& config);
  at::Tensor forward(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin, const std::optional<at::Tensor>& positions,
                     const std::optional<at::Tensor>& document_ids);

 private:
  nn::RMSNorm attention_norm_, ffn_norm_;
  SelfAttention attention_;
  GatedFeedForward feed_forward_ = nullptr;
  MixtureFeedForward mixture_ = nullptr;  ///< in its place, under its name
  nn::Dropout attention_dropout_, ffn_dropout_;
};
TESSERA_MODULE(LlamaBlock);

/// LLaMA (arXiv:2302.13971; grouped queries as in arXiv:2307.09288): RMSNorm before each part, rotary positions, SwiGLU, no biases. With model.experts it is
/// Mixtral (arXiv:2401.04088), whose feed-forward layers are mixtures of experts: layers.N.feed_forward.{router.weight, experts.w1, experts.w2, experts.w3}.
/// Parameters: embed_tokens.weight, layers.N.{attention_norm, attention.{wq, wk, wv, wo}, ffn_norm, feed_forward.{w1, w2, w3}}.weight, norm.weight,
/// head.weight. `model.dropout` drops after the embedding and after each part of a block.
class LlamaImpl : public LanguageModel {
 public:
  explicit LlamaImpl(const ModelConfig& config);
  at::Tensor embed(const at::Tensor& tokens, const TokenPlaces& places) override;
  int64_t num_blocks() const override { return std::ssize(layers_); }
  at::Tensor run_blocks(at::Tensor stream, int64_t begin, int64_t end, int64_t seq_len, const TokenPlaces& places) override;
  at::Tensor normed(const at::Tensor& stream) override { return norm_(stream); }
  std::string attention_pattern() const override { return "layers.*.attention.core"; }

 protected:
  std::vector<std::string> embedding_children() const override { return {"embed_tokens", "dropout"}; }

 private:
  nn::Embedding embed_tokens_;
  nn::RotaryEmbedding rotary_;
  nn::Dropout dropout_;
  std::vector<LlamaBlock> layers_;
  nn::RMSNorm norm_;
};
TESSERA_MODULE(Llama);

}  // namespace tessera
