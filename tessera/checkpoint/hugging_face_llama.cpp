#include <algorithm>

#include <fmt/format.h>

#include "tessera/checkpoint/hugging_face_family.h"

namespace tessera::checkpoint {
namespace {

/// To transformers 5 a rope_scaling that says anything is the whole rope_parameters, and 4 does not look at those: a theta that stands there alone is no one's.
void refuse_hidden_theta(const HuggingFaceConfig& config) {
  const auto has_theta = [&](const std::string& key) {
    const auto rope = config.find<nlohmann::json>(key);
    return rope && rope->is_object() && rope->contains("rope_theta") && !rope->at("rope_theta").is_null();
  };
  const auto scaling = config.find<nlohmann::json>("rope_scaling");
  const bool hides = scaling && !scaling->empty() && !has_theta("rope_scaling");
  require(!hides || !has_theta("rope_parameters") || config.find<double>("rope_theta"), config.file().string(), ": rope_theta of rope_parameters contradicts ",
          "rope_scaling = ", scaling.value_or(nullptr).dump(), ", which takes its place and has none; remove rope_scaling, or write rope_theta beside the two");
}

/// The wavelengths' base. transformers 5 writes rope_parameters, transformers 4 rope_theta and rope_scaling.
double read_rope_theta(const HuggingFaceConfig& config, double absent) {
  std::optional<double> theta = config.find<double>("rope_theta");
  std::string contradiction;
  for (const std::string key : {"rope_parameters", "rope_scaling"}) {
    const auto rope = config.find<nlohmann::json>(key);
    if (!rope) continue;
    const auto refuse = [&](const std::string& what) {
      throw ConfigError(detail::concat(config.file().string(), ": ", key, " = ", rope->dump(), ": ", what, " is not supported; only rope type 'default' is"));
    };
    if (!rope->is_object()) refuse("a rope that is no table");
    for (const auto& [name, value] : rope->items()) {
      if (value.is_null()) continue;
      if (name == "rope_theta" && value.is_number()) {
        if (theta.value_or(value) != value) contradiction = detail::concat("rope_theta = ", *theta, " contradicts ", key, ", where it is ", value.dump());
        theta = value.get<double>();
      } else if (name == "rope_type" || name == "type") {
        if (value != "default") refuse("rope type " + value.dump());
      } else if (name == "partial_rotary_factor") {
        if (value != 1.0) refuse("a partial rotation");
      } else {
        refuse("'" + name + "'");
      }
    }
  }
  refuse_hidden_theta(config);
  require(contradiction.empty(), config.file().string(), ": ", contradiction, "; correct the one that is wrong");
  require(theta.value_or(1) > 0, config.file().string(), ": rope_theta = ", theta.value_or(1), " must be positive");
  return theta.value_or(absent);
}

}  // namespace

ModelConfig read_llama_config(const HuggingFaceConfig& config, const LlamaDefaults& absent) {
  config.expect<std::string>("hidden_act", "silu", "silu", {"swish"});
  config.expect("attention_bias", false, false);
  config.expect("mlp_bias", false, false);
  ModelConfig model;
  model.dim = config.size("hidden_size");
  model.layers = config.size("num_hidden_layers", kMostLayers);
  model.heads = config.size("num_attention_heads");
  model.kv_heads = config.contains("num_key_value_heads") ? model.heads : absent.kv_heads.value_or(model.heads);
  if (config.find<int64_t>("num_key_value_heads")) model.kv_heads = config.size("num_key_value_heads");
  model.ffn_dim = config.size("intermediate_size");
  model.vocab_size = config.size("vocab_size");
  model.max_seq_len = config.size("max_position_embeddings", 1'000'000'000, absent.max_seq_len);
  model.tie_embeddings = config.find<bool>("tie_word_embeddings").value_or(false);
  model.rope_theta = read_rope_theta(config, absent.rope_theta);
  model.norm_eps = config.find<double>("rms_norm_eps").value_or(absent.norm_eps);
  const auto head_dim = config.find<int64_t>("head_dim");
  const bool usual = !head_dim || (model.dim % model.heads == 0 && *head_dim == model.dim / model.heads);  // not a product, which could overflow
  require(usual, config.file().string(), ": head_dim = ", head_dim.value_or(0), " is not supported beside hidden_size = ", model.dim, " and ", model.heads,
          " heads; only hidden_size / num_attention_heads is");
  return model;
}

int64_t read_sliding_window(const HuggingFaceConfig& config, int64_t absent) {
  int64_t window = absent;  // use_sliding_window is Qwen's: the classes that are read here do not look at it
  if (config.contains("sliding_window")) window = config.find<int64_t>("sliding_window") ? config.size("sliding_window") : 0;
  const auto layers = config.find<std::vector<std::string>>("layer_types");
  const bool alike = !layers || window == 0 || std::ranges::all_of(*layers, [](const std::string& layer) { return layer == "sliding_attention"; });
  require(alike, config.file().string(), ": layer_types with layers that see all positions beside sliding_window = ", window,
          " is not supported: here all layers of a model have one window; for layers that all see the whole sequence, set sliding_window to null");
  return window;
}

void refuse_sliding_window(const HuggingFaceConfig& config, const std::string& architecture) {
  const int64_t window = config.find<bool>("use_sliding_window").value_or(true) ? config.find<int64_t>("sliding_window").value_or(0) : 0;
  require(window == 0, config.file().string(), ": sliding_window = ", window, ": their ", architecture, " does not look at it and sees the whole sequence; ",
          "remove it, or, where a model of LLaMA's blocks was trained with it, set architectures to MistralForCausalLM and model_type to mistral");
}

nlohmann::json write_llama_config(const ModelConfig& model) {
  return {{"hidden_size", model.dim},
          {"num_hidden_layers", model.layers},
          {"num_attention_heads", model.heads},
          {"num_key_value_heads", model.kv_heads.value()},
          {"head_dim", model.dim / model.heads},
          {"intermediate_size", model.ffn_dim.value()},
          {"vocab_size", model.vocab_size},
          {"max_position_embeddings", model.max_seq_len.value()},
          {"tie_word_embeddings", model.tie_embeddings},
          {"rope_theta", model.rope_theta},
          {"rope_parameters", {{"rope_type", "default"}, {"rope_theta", model.rope_theta}}},
          {"rms_norm_eps", model.norm_eps},
          {"hidden_act", "silu"},
          {"attention_bias", false},
          {"mlp_bias", false}};
}

/// Both sides rotate halves of a head and store [out, in], so rows differ in their names alone.
std::vector<HuggingFaceTensor> make_llama_rows(const ModelConfig& model, const std::function<void(int64_t, std::vector<HuggingFaceTensor>&)>& feed_forward) {
  const int64_t dim = model.dim, kv_dim = model.kv_heads.value() * (dim / model.heads);
  std::vector<HuggingFaceTensor> table{{"embed_tokens.weight", "model.embed_tokens.weight", {model.vocab_size, dim}}};
  for (int64_t i = 0; i < model.layers; ++i) {
    const auto add = [&, i](const char* ours, const char* theirs, std::vector<int64_t> shape) {
      table.push_back({fmt::format("layers.{}.{}.weight", i, ours), fmt::format("model.layers.{}.{}.weight", i, theirs), std::move(shape)});
    };
    add("attention.wq", "self_attn.q_proj", {dim, dim});
    add("attention.wk", "self_attn.k_proj", {kv_dim, dim});
    add("attention.wv", "self_attn.v_proj", {kv_dim, dim});
    add("attention.wo", "self_attn.o_proj", {dim, dim});
    feed_forward(i, table);
    add("attention_norm", "input_layernorm", {dim});
    add("ffn_norm", "post_attention_layernorm", {dim});
  }
  table.push_back({"norm.weight", "model.norm.weight", {dim}});
  if (!model.tie_embeddings) table.push_back({"head.weight", "lm_head.weight", {model.vocab_size, dim}});
  return table;
}

bool is_ignorable_in_llama(const std::string& name) { return name.ends_with(".rotary_emb.inv_freq"); }

namespace {

std::vector<HuggingFaceTensor> make_llama_table(const ModelConfig& model) {
  const int64_t dim = model.dim, ffn = model.ffn_dim.value();
  return make_llama_rows(model, [&](int64_t layer, std::vector<HuggingFaceTensor>& table) {
    const auto add = [&](const char* ours, const char* theirs, std::vector<int64_t> shape) {
      table.push_back(
          {fmt::format("layers.{}.feed_forward.{}.weight", layer, ours), fmt::format("model.layers.{}.mlp.{}.weight", layer, theirs), std::move(shape)});
    };
    add("w1", "gate_proj", {ffn, dim});
    add("w3", "up_proj", {ffn, dim});
    add("w2", "down_proj", {dim, ffn});
  });
}

ModelConfig read_windowless_config(const HuggingFaceConfig& config) {
  refuse_sliding_window(config, "LlamaForCausalLM");
  return read_llama_config(config);
}

/// A LLaMA with a window. What a file leaves out is what their class takes for it.
ModelConfig read_mistral_config(const HuggingFaceConfig& config) {
  constexpr int64_t kWindow = 4096;
  ModelConfig model = read_llama_config(config, {.max_seq_len = kMistralPositions, .kv_heads = 8});
  model.sliding_window = read_sliding_window(config, kWindow);
  return model;
}

nlohmann::json write_mistral_config(const ModelConfig& model) {
  nlohmann::json config = write_llama_config(model);
  config.erase("mlp_bias");
  config.erase("attention_bias");
  config["sliding_window"] = model.sliding_window;
  return config;
}

std::string refuse_windows(const ModelConfig& model) {
  return model.sliding_window == 0 ? "" : fmt::format("model.sliding_window = {}: their Llama sees the whole sequence", model.sliding_window);
}

}  // namespace

const HuggingFaceFamily& llama_family() {
  static const HuggingFaceFamily family{
      "llama", "llama", "LlamaForCausalLM", "", read_windowless_config, write_llama_config, make_llama_table, is_ignorable_in_llama, refuse_windows};
  return family;
}

const HuggingFaceFamily& mistral_family() {
  static const HuggingFaceFamily family{
      "llama", "mistral", "MistralForCausalLM", "", read_mistral_config, write_mistral_config, make_llama_table, is_ignorable_in_llama};
  return family;
}

}  // namespace tessera::checkpoint
