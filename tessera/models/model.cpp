#include "tessera/models/model.h"

#include <algorithm>

#include <torch/nn/modules/container/moduledict.h>

#include "tessera/core/error.h"
#include "tessera/models/gpt2.h"
#include "tessera/models/llama.h"
#include "tessera/models/mlp.h"
#include "tessera/nn/attach.h"
#include "tessera/nn/parameter.h"

namespace tessera {
namespace {

constexpr const char* kBlocks = "layers";  // the one child that holds the repeated blocks

bool has_link(const std::vector<ChainRange>& ranges, int64_t link) {
  return std::ranges::any_of(ranges, [&](const ChainRange& range) { return range.begin <= link && link < range.end; });
}

/// Which of the model's children some links need, under their names; of the blocks a list that names them as before.
std::vector<std::pair<std::string, std::shared_ptr<torch::nn::Module>>> children_of(const LanguageModel& model, const std::vector<std::string>& embedding,
                                                                                    const std::vector<ChainRange>& ranges) {
  std::vector<std::pair<std::string, std::shared_ptr<torch::nn::Module>>> kept;
  bool has_blocks = false;
  for (int64_t link = 1; link <= model.num_blocks(); ++link) has_blocks |= has_link(ranges, link);
  for (const auto& child : model.named_children()) {
    const std::string& name = child.key();
    if (name == kBlocks) {
      torch::OrderedDict<std::string, std::shared_ptr<torch::nn::Module>> blocks;
      for (const auto& block : child.value()->named_children()) {
        if (has_link(ranges, 1 + std::stoll(block.key()))) blocks.insert(block.key(), block.value());
      }
      if (!blocks.is_empty()) kept.emplace_back(name, torch::nn::ModuleDict(blocks).ptr());
    } else if (name == "norm" || name == "head") {
      if (has_link(ranges, model.num_links() - 1)) kept.emplace_back(name, child.value());
    } else {
      const bool embeds = std::ranges::find(embedding, name) != embedding.end();
      if (embeds ? has_link(ranges, 0) : has_blocks) kept.emplace_back(name, child.value());
    }
  }
  return kept;
}

}  // namespace

std::string LanguageModel::link_name(int64_t link) const {
  if (link == 0) return "embed_tokens";
  return link <= num_blocks() ? detail::concat(kBlocks, ".", link - 1) : "head";
}

void LanguageModel::keep(const std::vector<ChainRange>& ranges) {
  const auto kept = children_of(*this, embedding_children(), ranges);
  for (const auto& name : named_children().keys()) unregister_module(name);
  for (const auto& [name, child] : kept) register_module(name, child);
}

ModelPartImpl::ModelPartImpl(std::shared_ptr<LanguageModel> model, ChainRange range) : model_(std::move(model)), range_(range) {
  for (const auto& [name, child] : children_of(*model_, model_->embedding_children(), {range})) register_module(name, child);
}

at::Tensor ModelPartImpl::forward(const at::Tensor& input, const std::optional<at::Tensor>& labels, int64_t seq_len, const std::optional<at::Tensor>& positions,
                                  const std::optional<at::Tensor>& document_ids, bool last_alone) {
  const TokenPlaces places{positions, document_ids};
  const int64_t first_block = std::max<int64_t>(range_.begin, 1) - 1, blocks_end = std::min(range_.end - 1, model_->num_blocks());
  at::Tensor stream = takes_tokens() ? model_->embed(input, places) : input;
  if (first_block < blocks_end) stream = model_->run_blocks(stream, first_block, blocks_end, seq_len, places);
  return gives_loss() ? model_->through_head(model_->normed(stream), labels, seq_len, last_alone) : stream;
}

void LanguageModel::register_head(const at::Tensor& embedding_weight) {
  if (config_.tie_embeddings) {
    head_ = nn::LanguageModelHead(embedding_weight);
  } else {
    head_ = nn::LanguageModelHead(config_.dim, config_.vocab_size);
    nn::set_init(head_->weight, nn::InitRule::normal(0, kInitStd));
  }
  register_module("head", head_);
}

at::Tensor LanguageModel::forward(const at::Tensor& tokens, const std::optional<at::Tensor>& labels, const std::optional<at::Tensor>& positions,
                                  const std::optional<at::Tensor>& document_ids, bool last_alone) {
  require(tokens.dim() == 2, "a language model takes tokens [B, S], not a tensor of shape ", tokens.sizes());
  return through_head(hidden(tokens, {positions, document_ids}), labels, tokens.size(1), last_alone);
}

at::Tensor LanguageModel::through_head(const at::Tensor& hidden, const std::optional<at::Tensor>& labels, int64_t seq_len, bool last_alone) {
  if (!last_alone) return head_(hidden, labels);
  // Where ranks hold parts of the sequence, the head puts it together, and no rank of several holds all of more than one column.
  const bool whole = hidden.size(1) == seq_len;
  const at::Tensor logits = head_->logits(whole ? hidden.narrow(1, seq_len - 1, 1) : hidden);
  return logits.narrow(1, logits.size(1) - 1, 1);
}

std::shared_ptr<LanguageModel> make_model_for_stages(const ModelConfig& config) {
  ModelConfig apart = config;
  apart.tie_embeddings = false;
  auto model = make_model(apart);
  if (!config.tie_embeddings) return model;
  const at::Tensor& weight = model->head()->weight;
  nn::set_slice(weight, Slice::whole("embed_tokens.weight", weight.sizes().vec()));
  return model;
}

std::shared_ptr<LanguageModel> make_model(const ModelConfig& config) {
  const auto build = [&]() -> std::shared_ptr<LanguageModel> {
    if (config.family == "llama" || config.family == "mixtral") return Llama(config).ptr();
    if (config.family == "gpt2") return Gpt2(config).ptr();
    if (config.family == "mlp") return Mlp(config).ptr();
    throw ConfigError("model.family = '" + config.family + "' does not exist; use llama, gpt2, mixtral or mlp");
  };
  require(config.vocab_size > 0, "model.vocab_size = ", config.vocab_size, " must be positive");
  auto model = build();
  nn::assign_paths(*model);
  return model;
}

}  // namespace tessera
