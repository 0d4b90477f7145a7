#pragma once

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include "tessera/config/config.h"
#include "tessera/nn/head.h"
#include "tessera/nn/module.h"

namespace tessera {

/// Legend: B rows (sequences), S positions, D model width, V vocabulary.

/// Where tokens stand, when that is not columns 0..S-1 of one document each.
struct TokenPlaces {
  std::optional<at::Tensor> positions;     ///< [S] int64; of packed documents, in each
  std::optional<at::Tensor> document_ids;  ///< [B, S]: attention stays inside a document
};

/// A run of the links that a model is a chain of: link 0 is the embedding, 1 .. num_blocks() are the blocks, the last one is the norm with the head.
struct ChainRange {
  int64_t begin = 0, end = 0;  ///< one past the last

  bool operator==(const ChainRange&) const = default;
};

/// A decoder that predicts the next token: embedding -> blocks -> norm -> head. Structure only: it knows no technique, no device, no data.
/// The residual stream has the dtype of the parameters (fp32); products and attention compute in `compute_dtype`, norms hand it on; softmax and loss are fp32.
class LanguageModel : public nn::Module {
 public:
  /// tokens [B, S] int64 -> logits [B, S, V] in the compute dtype; with labels [B, S] int64 (-100 = no target): the fp32 SUM of the
  /// cross-entropy over all targets, for the caller to divide by the global count. positions, document_ids: see TokenPlaces. `last_alone`: logits of the last
  /// position, [B, 1, V], which is all that a continuation asks for.
  at::Tensor forward(const at::Tensor& tokens, const std::optional<at::Tensor>& labels = {}, const std::optional<at::Tensor>& positions = {},
                     const std::optional<at::Tensor>& document_ids = {}, bool last_alone = false);

  /// Through the chain of what is attached to the model.
  at::Tensor logits(const at::Tensor& tokens) { return nn::call(*this, tokens); }
  at::Tensor loss_sum(const at::Tensor& tokens, const at::Tensor& labels) { return nn::call(*this, tokens, labels); }

  /// The chain that the model is, link by link, for engines that let a rank run some of them: embedding, blocks, norm; then the head.
  virtual at::Tensor embed(const at::Tensor& tokens, const TokenPlaces& places) = 0;  ///< [B, S] -> the residual stream [B, S, D]
  virtual int64_t num_blocks() const = 0;
  /// The stream through the blocks `begin` .. `end` - 1. `seq_len`: of the tokens' rows; the stream may hold a part of them (sequence parallelism).
  virtual at::Tensor run_blocks(at::Tensor stream, int64_t begin, int64_t end, int64_t seq_len, const TokenPlaces& places) = 0;
  virtual at::Tensor normed(const at::Tensor& stream) = 0;  ///< what the head takes

  int64_t num_links() const { return num_blocks() + 2; }
  /// What a link is called: the path of a block, "embed_tokens", "head".
  std::string link_name(int64_t link) const;

  /// Lets go of the links outside of `ranges`: their modules leave the tree of a model on meta before anything of them has memory, and the others keep their
  /// paths (layers.7 stays layers.7). From then on ModelPart runs the ranges, and the model itself is not called.
  void keep(const std::vector<ChainRange>& ranges);

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

  /// Names of the children that the embedding link is made of; those that are in no link (tables) go with the blocks.
  virtual std::vector<std::string> embedding_children() const { return {"embed_tokens"}; }

  /// What the head makes of normed hidden states [B, S, D], or this rank's part of the sequence; `seq_len` is S.
  at::Tensor through_head(const at::Tensor& hidden, const std::optional<at::Tensor>& labels, int64_t seq_len, bool last_alone);

  /// Registers the head: with a weight of its own, or sharing `embedding_weight` where the configuration ties them.
  void register_head(const at::Tensor& embedding_weight);

 private:
  friend class ModelPartImpl;

  ModelConfig config_;
  nn::LanguageModelHead head_ = nullptr;
};

/// Some links of a model, as a module of its own that shares the model's modules under their paths: what a stage of a pipeline calls, and what shards or
/// synchronizes the stage's parameters.
class ModelPartImpl : public nn::Module {
 public:
  ModelPartImpl(std::shared_ptr<LanguageModel> model, ChainRange range);

  /// input: tokens [B, S] where the range begins with the embedding, else the residual stream, or this rank's part of it; `seq_len` is S.
  /// Gives the stream; behind the head what LanguageModel::forward gives: logits, or with labels [B, S] the fp32 sum of the loss.
  at::Tensor forward(const at::Tensor& input, const std::optional<at::Tensor>& labels, int64_t seq_len, const std::optional<at::Tensor>& positions = {},
                     const std::optional<at::Tensor>& document_ids = {}, bool last_alone = false);

  const ChainRange& range() const noexcept { return range_; }
  bool takes_tokens() const { return range_.begin == 0; }
  bool gives_loss() const { return range_.end == model_->num_links(); }

 private:
  std::shared_ptr<LanguageModel> model_;  ///< of which some links are registered here
  ChainRange range_;
};
TESSERA_MODULE(ModelPart);

/// The same as make_model for a model that is going to be cut into stages: where the configuration ties them, the head's weight is a tensor of its own under
/// the embedding's name, with the same first values. Whoever puts the two on different stages sums their gradients (pipeline/tied.h).
std::shared_ptr<LanguageModel> make_model_for_stages(const ModelConfig& config);

/// The model that `config` describes, with paths assigned; wrap in on_meta to build it without memory. `config` is resolved (see resolve(Config&)).
/// Throws ConfigError for a family that does not exist or is not built yet.
std::shared_ptr<LanguageModel> make_model(const ModelConfig& config);

}  // namespace tessera
