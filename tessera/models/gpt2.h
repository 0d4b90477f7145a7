#pragma once

#include <vector>

#include "tessera/models/blocks.h"
#include "tessera/models/model.h"
#include "tessera/nn/embedding.h"
#include "tessera/nn/norm.h"

namespace tessera {

/// h = x + attention(attention_norm(x)); h + feed_forward(ffn_norm(h)), x [B, S, D].
class Gpt2BlockImpl : public nn::Module {
 public:
  explicit Gpt2BlockImpl(const ModelConfig& config);
  at::Tensor forward(const at::Tensor& x, const std::optional<at::Tensor>& positions, const std::optional<at::Tensor>& document_ids);

 private:
  nn::LayerNorm attention_norm_, ffn_norm_;
  SelfAttention attention_;
  FeedForward feed_forward_;
  nn::Dropout attention_dropout_, ffn_dropout_;
};
TESSERA_MODULE(Gpt2Block);

/// GPT-2 (Radford et al., 2019): LayerNorm before each part, learned positions, GELU (tanh form), biases everywhere.
/// Parameters: embed_tokens.weight, embed_positions.weight, layers.N.{attention_norm, attention.{wq, wk, wv, wo}, ffn_norm, feed_forward.{w1, w2}}.{weight,
/// bias}, norm.{weight, bias}, head.weight (the published models tie it: model.tie_embeddings). `model.dropout` drops after the embeddings and after each part
/// of a block; attention weights are not dropped (flash attention keeps none).
class Gpt2Impl : public LanguageModel {
 public:
  explicit Gpt2Impl(const ModelConfig& config);
  at::Tensor embed(const at::Tensor& tokens, const TokenPlaces& places) override;
  int64_t num_blocks() const override { return std::ssize(layers_); }
  at::Tensor run_blocks(at::Tensor stream, int64_t begin, int64_t end, int64_t seq_len, const TokenPlaces& places) override;
  at::Tensor normed(const at::Tensor& stream) override { return norm_(stream); }
  std::string attention_pattern() const override { return "layers.*.attention.core"; }

 protected:
  std::vector<std::string> embedding_children() const override { return {"embed_tokens", "embed_positions", "dropout"}; }

 private:
  nn::Embedding embed_tokens_, embed_positions_;
  nn::Dropout dropout_;
  std::vector<Gpt2Block> layers_;
  nn::LayerNorm norm_;
};
TESSERA_MODULE(Gpt2);

}  // namespace tessera
