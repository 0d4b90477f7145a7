#pragma once

#include <vector>

#include "tessera/models/blocks.h"
#include "tessera/models/model.h"
#include "tessera/nn/embedding.h"
#include "tessera/nn/norm.h"

namespace tessera {

/// x + feed_forward(ffn_norm(x)), x [B, S, D].
class MlpBlockImpl : public nn::Module {
 public:
  explicit MlpBlockImpl(const ModelConfig& config);
  at::Tensor forward(const at::Tensor& x);

 private:
  nn::LayerNorm ffn_norm_;
  FeedForward feed_forward_;
  nn::Dropout ffn_dropout_;
};
TESSERA_MODULE(MlpBlock);

/// The smallest language model: a residual multi-layer perceptron that predicts the next token from the present one alone, every position by itself. It learns
/// bigrams; what it is for is to run every technique that needs no attention in the shortest time. model.heads is not used.
/// Parameters: embed_tokens.weight, layers.N.{ffn_norm, feed_forward.{w1, w2}}.{weight, bias}, norm.{weight, bias}, head.weight.
class MlpImpl : public LanguageModel {
 public:
  explicit MlpImpl(const ModelConfig& config);
  at::Tensor embed(const at::Tensor& tokens, const TokenPlaces& places) override;
  int64_t num_blocks() const override { return std::ssize(layers_); }
  at::Tensor run_blocks(at::Tensor stream, int64_t begin, int64_t end, int64_t seq_len, const TokenPlaces& places) override;
  at::Tensor normed(const at::Tensor& stream) override { return norm_(stream); }

 private:
  nn::Embedding embed_tokens_;
  std::vector<MlpBlock> layers_;
  nn::LayerNorm norm_;
};
TESSERA_MODULE(Mlp);

}  // namespace tessera
