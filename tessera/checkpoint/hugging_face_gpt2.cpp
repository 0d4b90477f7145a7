#include <fmt/format.h>

#include "tessera/checkpoint/hugging_face_family.h"

namespace tessera::checkpoint {
namespace {

ModelConfig read_gpt2_config(const HuggingFaceConfig& config) {
  refuse_sliding_window(config, "GPT2LMHeadModel");
  config.expect<std::string>("activation_function", "gelu_new", "gelu_new", {"gelu_pytorch_tanh"});
  config.expect("scale_attn_weights", true, true);
  config.expect("scale_attn_by_inverse_layer_idx", false, false);
  config.expect("reorder_and_upcast_attn", false, false);
  config.expect("add_cross_attention", false, false);
  ModelConfig model;
  model.dim = config.size_by("n_embd", "hidden_size");
  model.layers = config.size_by("n_layer", "num_hidden_layers", kMostLayers);
  model.heads = config.size_by("n_head", "num_attention_heads");
  model.kv_heads = model.heads;
  model.ffn_dim = config.find<int64_t>("n_inner") ? config.size("n_inner") : 4 * model.dim;
  model.vocab_size = config.size("vocab_size");
  model.max_seq_len = config.size_by("n_positions", "max_position_embeddings");
  config.refuse_null("tie_word_embeddings");
  model.tie_embeddings = config.find<bool>("tie_word_embeddings").value_or(true);
  model.norm_eps = config.find<double>("layer_norm_epsilon").value_or(1e-5);
  return model;
}

nlohmann::json write_gpt2_config(const ModelConfig& model) {
  return {{"n_embd", model.dim},
          {"n_layer", model.layers},
          {"n_head", model.heads},
          {"n_inner", model.ffn_dim.value()},
          {"vocab_size", model.vocab_size},
          {"n_positions", model.max_seq_len.value()},
          {"tie_word_embeddings", model.tie_embeddings},
          {"layer_norm_epsilon", model.norm_eps},
          {"activation_function", "gelu_new"},
          {"embd_pdrop", model.dropout},
          {"attn_pdrop", 0.0},  // of attention's probabilities: ours drops its output, as their resid_pdrop does
          {"resid_pdrop", model.dropout}};
}

/// Their Conv1D stores [in, out], and c_attn is q, k and v side by side.
std::vector<HuggingFaceTensor> make_gpt2_table(const ModelConfig& model) {
  const int64_t dim = model.dim, ffn = model.ffn_dim.value();
  std::vector<HuggingFaceTensor> table{
      {"embed_tokens.weight", "transformer.wte.weight", {model.vocab_size, dim}},
      {"embed_positions.weight", "transformer.wpe.weight", {model.max_seq_len.value(), dim}, false, 0, 0, /*leading=*/true},
  };
  for (int64_t i = 0; i < model.layers; ++i) {
    const auto ours = [&](const char* name) { return fmt::format("layers.{}.{}", i, name); };
    const auto theirs = [&](const char* name) { return fmt::format("transformer.h.{}.{}", i, name); };
    const auto add_norm = [&](const char* our, const char* their) {
      for (const char* part : {".weight", ".bias"}) table.push_back({ours(our) + part, theirs(their) + part, {dim}});
    };
    const auto add_linear = [&](const char* our, const char* their, int64_t out, int64_t in) {
      table.push_back({ours(our) + ".weight", theirs(their) + ".weight", {out, in}, /*transposed=*/true});
      table.push_back({ours(our) + ".bias", theirs(their) + ".bias", {out}});
    };
    add_norm("attention_norm", "ln_1");
    const std::vector<std::string> fused{"attention.wq", "attention.wk", "attention.wv"};
    for (size_t n = 0; n < fused.size(); ++n) {
      table.push_back(
          {ours(fused[n].c_str()) + ".weight", theirs("attn.c_attn.weight"), {dim, dim}, /*transposed=*/true, /*dim=*/1, static_cast<int64_t>(n) * dim});
    }
    for (size_t n = 0; n < fused.size(); ++n) {
      table.push_back({ours(fused[n].c_str()) + ".bias", theirs("attn.c_attn.bias"), {dim}, /*transposed=*/false, /*dim=*/0, static_cast<int64_t>(n) * dim});
    }
    add_linear("attention.wo", "attn.c_proj", dim, dim);
    add_norm("ffn_norm", "ln_2");
    add_linear("feed_forward.w1", "mlp.c_fc", ffn, dim);
    add_linear("feed_forward.w2", "mlp.c_proj", dim, ffn);
  }
  table.push_back({"norm.weight", "transformer.ln_f.weight", {dim}});
  table.push_back({"norm.bias", "transformer.ln_f.bias", {dim}});
  if (!model.tie_embeddings) table.push_back({"head.weight", "lm_head.weight", {model.vocab_size, dim}});
  return table;
}

/// Causal masks, which published files carry as if they were parameters.
bool is_ignorable_in_gpt2(const std::string& name) { return name.ends_with(".attn.bias") || name.ends_with(".attn.masked_bias"); }

std::string refuse_gpt2_windows(const ModelConfig& model) {
  return model.sliding_window == 0 ? "" : fmt::format("model.sliding_window = {}: their GPT-2 sees the whole sequence", model.sliding_window);
}

}  // namespace

const HuggingFaceFamily& gpt2_family() {
  static const HuggingFaceFamily family{
      "gpt2", "gpt2", "GPT2LMHeadModel", "transformer.", read_gpt2_config, write_gpt2_config, make_gpt2_table, is_ignorable_in_gpt2, refuse_gpt2_windows};
  return family;
}

}  // namespace tessera::checkpoint
