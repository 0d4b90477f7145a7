#pragma once

#include <memory>
#include <optional>
#include <string>
#include <utility>

#include <ATen/core/Tensor.h>

#include "tessera/config/config.h"
#include "tessera/nn/head.h"
#include "tessera/nn/module.h"

namespace tessera {

/// Legend: B rows (sequences), S positions, D model width, V vocabulary.

/// Where tokens stand, when that is not columns 0..S-1 of one document each.
struct TokenPlaces {
  std::optional<at::Tensor> positions;     ///< [S] int64
  std::optional<at::Tensor> document_ids;  ///< [B, S]: attention stays inside a document
};

/// A decoder that predicts the next token: embedding -> blocks -> norm -> head. Structure only: it knows no technique, no device, no data.
/// The residual stream has the dtype of the parameters (fp32); products and attention compute in `compute_dtype`, norms hand it on; softmax and loss are fp32.
class LanguageModel : public nn::Module {
 public:
  /// tokens [B, S] int64 -> logits [B, S, V] in the compute dtype; with labels [B, S] int64 (-100 = no target): the fp32 SUM of the
  /// cross-entropy over all targets, for the caller to divide by the global count. positions, document_ids: see TokenPlaces.
  at::Tensor forward(const at::Tensor& tokens, const std::optional<at::Tensor>& labels = {}, const std::optional<at::Tensor>& positions = {},
                     const std::optional<at::Tensor>& document_ids = {});

  /// Through the chain of what is attached to the model.
  at::Tensor logits(const at::Tensor& tokens) { return nn::call(*this, tokens); }
  at::Tensor loss_sum(const at::Tensor& tokens, const at::Tensor& labels) { return nn::call(*this, tokens, labels); }

  /// The chain that the model is, link by link, for engines that let a rank run some of them: embedding, blocks, norm; then the head.
  virtual at::Tensor embed(const at::Tensor& tokens, const TokenPlaces& places) = 0;  ///< [B, S] -> the residual stream [B, S, D]
  virtual int64_t num_blocks() const = 0;
  /// The stream through the blocks `begin` .. `end` - 1. `seq_len`: of the tokens' rows; the stream may hold a part of them (sequence parallelism).
  virtual at::Tensor run_blocks(at::Tensor stream, int64_t begin, int64_t end, int64_t seq_len, const TokenPlaces& places) = 0;
  virtual at::Tensor normed(const at::Tensor& stream) = 0;  ///< what the head takes

  /// tokens [B, S] -> the normed hidden states [B, S, D] that the head takes: all links but the head.
  at::Tensor hidden(const at::Tensor& tokens, const TokenPlaces& places) {
    return normed(run_blocks(embed(tokens, places), 0, num_blocks(), tokens.size(1), places));
  }

  /// The head and loss: one module, "head", that owns (or shares) the output weight.
  nn::LanguageModelHead& head() { return head_; }

  /// Paths of the repeated blocks, and of the attention cores (none: empty), as patterns.
  virtual std::string block_pattern() const { return "layers.*"; }
  virtual std::string attention_pattern() const { return ""; }

  const ModelConfig& config() const noexcept { return config_; }
  int64_t max_seq_len() const { return config_.max_seq_len.value_or(0); }

 protected:
  explicit LanguageModel(ModelConfig config) : config_(std::move(config)) {}

  /// Registers the head: with a weight of its own, or sharing `embedding_weight` where the configuration ties them.
  void register_head(const at::Tensor& embedding_weight);

 private:
  ModelConfig config_;
  nn::LanguageModelHead head_ = nullptr;
};

/// The model that `config` describes, with paths assigned; wrap in on_meta to build it without memory. `config` is resolved (see resolve(Config&)).
/// Throws ConfigError for a family that does not exist or is not built yet.
std::shared_ptr<LanguageModel> make_model(const ModelConfig& config);

}  // namespace tessera
