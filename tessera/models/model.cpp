#include "tessera/models/model.h"

#include "tessera/core/error.h"
#include "tessera/models/gpt2.h"
#include "tessera/models/llama.h"
#include "tessera/models/mlp.h"
#include "tessera/nn/attach.h"
#include "tessera/nn/parameter.h"

namespace tessera {

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
                                  const std::optional<at::Tensor>& document_ids) {
  require(tokens.dim() == 2, "a language model takes tokens [B, S], not a tensor of shape ", tokens.sizes());
  return head_(hidden(tokens, {positions, document_ids}), labels);
}

std::shared_ptr<LanguageModel> make_model(const ModelConfig& config) {
  const auto build = [&]() -> std::shared_ptr<LanguageModel> {
    if (config.family == "llama") return Llama(config).ptr();
    if (config.family == "gpt2") return Gpt2(config).ptr();
    if (config.family == "mlp") return Mlp(config).ptr();
    require(config.family != "mixtral",
            "model.family = 'mixtral': mixtures of experts come with expert parallelism, which this build does not have; use llama, gpt2 or mlp");
    throw ConfigError("model.family = '" + config.family + "' does not exist; use llama, gpt2 or mlp");
  };
  require(config.vocab_size > 0, "model.vocab_size = ", config.vocab_size, " must be positive");
  auto model = build();
  nn::assign_paths(*model);
  return model;
}

}  // namespace tessera
