#include <fmt/format.h>

#include "tessera/checkpoint/hugging_face_family.h"
#include "tessera/config/limits.h"

namespace tessera::checkpoint {
namespace {

ModelConfig read_mixtral_config(const HuggingFaceConfig& config) {
  ModelConfig model = read_llama_config(config, {.rope_theta = 1e6, .norm_eps = 1e-5, .max_seq_len = kMistralPositions, .kv_heads = 8});
  config.expect("router_jitter_noise", 0.0, 0.0);
  model.sliding_window = read_sliding_window(config, 0);
  model.experts = config.size_by("num_local_experts", "num_experts", kMostExperts, 8);  // what their class takes, as of the next
  model.experts_per_token = config.size("num_experts_per_tok", model.experts, 2);
  return model;
}

nlohmann::json write_mixtral_config(const ModelConfig& model) {
  nlohmann::json config = write_llama_config(model);
  config.erase("mlp_bias");
  config["num_local_experts"] = model.experts;
  config["num_experts_per_tok"] = model.experts_per_token;
  config["sliding_window"] = model.sliding_window == 0 ? nlohmann::json() : nlohmann::json(model.sliding_window);
  return config;
}

/// What their class computes besides is a matter of its training.
std::string refuse_other_mixtures(const ModelConfig& model) {
  if (model.router != "softmax") return "model.router = " + model.router + ": their Mixtral routes by softmax";
  if (!model.norm_topk) return "model.norm_topk = false: the weights of their Mixtral sum to one";
  if (model.shared_ffn_dim > 0) return fmt::format("model.shared_ffn_dim = {}: their Mixtral has no shared expert", model.shared_ffn_dim);
  return "";
}

/// Our stacked rows of expert e begin at e * (rows of one).
HuggingFaceTensor rows_of_expert(const ModelConfig& model, int64_t layer, int64_t expert, const std::string& ours) {
  const bool down = ours == "w2";
  const int64_t rows = down ? model.dim : model.ffn_dim.value(), columns = down ? model.ffn_dim.value() : model.dim;
  HuggingFaceTensor row{fmt::format("layers.{}.feed_forward.experts.{}", layer, ours), "", {rows, columns}};
  row.row = expert * rows;
  row.rows = model.experts * rows;
  return row;
}

/// As Mixtral was published, and as transformers 5 saves it, too: a tensor for each expert.
std::vector<HuggingFaceTensor> make_mixtral_table(const ModelConfig& model) {
  return make_llama_rows(model, [&](int64_t layer, std::vector<HuggingFaceTensor>& table) {
    const std::string prefix = fmt::format("model.layers.{}.block_sparse_moe.", layer);
    table.push_back({fmt::format("layers.{}.feed_forward.router.weight", layer), prefix + "gate.weight", {model.experts, model.dim}});
    for (int64_t expert = 0; expert < model.experts; ++expert) {
      for (const char* name : {"w1", "w2", "w3"}) {
        HuggingFaceTensor row = rows_of_expert(model, layer, expert, name);
        row.theirs = fmt::format("{}experts.{}.{}.weight", prefix, expert, name);
        table.push_back(std::move(row));
      }
    }
  });
}

/// As transformers 5 holds it: gate and up of all experts in one tensor [E, 2 F, D].
std::vector<HuggingFaceTensor> make_fused_table(const ModelConfig& model) {
  return make_llama_rows(model, [&](int64_t layer, std::vector<HuggingFaceTensor>& table) {
    const std::string prefix = fmt::format("model.layers.{}.mlp.", layer);
    table.push_back({fmt::format("layers.{}.feed_forward.router.weight", layer), prefix + "gate.weight", {model.experts, model.dim}});
    for (const auto& [theirs, ours] : {std::pair{"experts.gate_up_proj", std::vector<std::string>{"w1", "w3"}}, {"experts.down_proj", {"w2"}}}) {
      for (int64_t expert = 0; expert < model.experts; ++expert) {
        for (const std::string& name : ours) {
          HuggingFaceTensor row = rows_of_expert(model, layer, expert, name);
          row.theirs = prefix + theirs;
          row.index = expert;
          row.offset = name == "w3" ? model.ffn_dim.value() : 0;
          table.push_back(std::move(row));
        }
      }
    }
  });
}

}  // namespace

const HuggingFaceFamily& mixtral_family() {
  static const HuggingFaceFamily family{.family = "mixtral",
                                        .model_type = "mixtral",
                                        .architecture = "MixtralForCausalLM",
                                        .prefix = "",
                                        .read_config = read_mixtral_config,
                                        .write_config = write_mixtral_config,
                                        .table = make_mixtral_table,
                                        .ignorable = is_ignorable_in_llama,
                                        .refusal = refuse_other_mixtures,
                                        .fused_table = make_fused_table,
                                        .fused = ".mlp.experts.gate_up_proj"};
  return family;
}

}  // namespace tessera::checkpoint
