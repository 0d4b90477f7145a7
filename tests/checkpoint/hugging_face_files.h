#pragma once

#include <map>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "tessera/checkpoint/safetensors.h"
#include "tests/checkpoint/files.h"

namespace tessera::checkpoint {

using Tensors = std::map<std::string, at::Tensor>;

inline void write_safetensors(const std::filesystem::path& path, const Tensors& tensors) {
  std::vector<TensorSpec> specs;
  for (const auto& [name, tensor] : tensors) specs.push_back({name, tensor.scalar_type(), tensor.sizes().vec()});
  SafetensorsWriter writer(path, specs, {{"format", "pt"}});
  for (const auto& [name, tensor] : tensors) writer.write(tensor);
  writer.finish();
}

inline Tensors read_safetensors(const std::filesystem::path& path) {
  const SafetensorsFile file(path);
  Tensors tensors;
  for (const auto& [name, entry] : file.entries()) tensors[name] = file.tensor(name);
  return tensors;
}

/// What transformers 4 writes for a LLaMA of 2 layers: width 8, 4 heads, 2 of them for keys and values.
inline nlohmann::json llama_config() {
  return {{"architectures", {"LlamaForCausalLM"}},
          {"attention_bias", false},
          {"hidden_act", "silu"},
          {"hidden_size", 8},
          {"intermediate_size", 12},
          {"max_position_embeddings", 16},
          {"model_type", "llama"},
          {"num_attention_heads", 4},
          {"num_hidden_layers", 2},
          {"num_key_value_heads", 2},
          {"rms_norm_eps", 1e-6},
          {"rope_scaling", nullptr},
          {"rope_theta", 5000.0},
          {"tie_word_embeddings", false},
          {"torch_dtype", "float32"},
          {"vocab_size", 11}};
}

inline Tensors llama_tensors() {
  at::manual_seed(3);
  Tensors tensors{{"model.embed_tokens.weight", at::randn({11, 8})}, {"model.norm.weight", at::randn({8})}, {"lm_head.weight", at::randn({11, 8})}};
  for (const std::string layer : {"model.layers.0.", "model.layers.1."}) {
    tensors[layer + "self_attn.q_proj.weight"] = at::randn({8, 8});
    tensors[layer + "self_attn.k_proj.weight"] = at::randn({4, 8});
    tensors[layer + "self_attn.v_proj.weight"] = at::randn({4, 8});
    tensors[layer + "self_attn.o_proj.weight"] = at::randn({8, 8});
    tensors[layer + "mlp.gate_proj.weight"] = at::randn({12, 8});
    tensors[layer + "mlp.up_proj.weight"] = at::randn({12, 8});
    tensors[layer + "mlp.down_proj.weight"] = at::randn({8, 12});
    tensors[layer + "input_layernorm.weight"] = at::randn({8});
    tensors[layer + "post_attention_layernorm.weight"] = at::randn({8});
  }
  return tensors;
}

/// A GPT-2 of 1 layer: width 6, 3 heads; n_inner is null, and the head is tied by default.
inline nlohmann::json gpt2_config() {
  return {{"architectures", {"GPT2LMHeadModel"}},
          {"activation_function", "gelu_new"},
          {"layer_norm_epsilon", 1e-5},
          {"model_type", "gpt2"},
          {"n_ctx", 10},
          {"n_embd", 6},
          {"n_head", 3},
          {"n_inner", nullptr},
          {"n_layer", 1},
          {"n_positions", 10},
          {"vocab_size", 7}};
}

inline Tensors gpt2_tensors(const std::string& prefix = "transformer.") {
  at::manual_seed(4);
  const std::string block = prefix + "h.0.";
  return {{prefix + "wte.weight", at::randn({7, 6})},
          {prefix + "wpe.weight", at::randn({10, 6})},
          {block + "ln_1.weight", at::randn({6})},
          {block + "ln_1.bias", at::randn({6})},
          {block + "attn.c_attn.weight", at::randn({6, 18})},
          {block + "attn.c_attn.bias", at::randn({18})},
          {block + "attn.c_proj.weight", at::randn({6, 6})},
          {block + "attn.c_proj.bias", at::randn({6})},
          {block + "ln_2.weight", at::randn({6})},
          {block + "ln_2.bias", at::randn({6})},
          {block + "mlp.c_fc.weight", at::randn({6, 24})},
          {block + "mlp.c_fc.bias", at::randn({24})},
          {block + "mlp.c_proj.weight", at::randn({24, 6})},
          {block + "mlp.c_proj.bias", at::randn({6})},
          {prefix + "ln_f.weight", at::randn({6})},
          {prefix + "ln_f.bias", at::randn({6})}};
}

/// Writes a model's folder.
inline std::filesystem::path write_model(const TemporaryFolder& folder, const nlohmann::json& config, const Tensors& tensors) {
  write_all(folder / "config.json", config.dump());
  write_safetensors(folder / "model.safetensors", tensors);
  return folder.path();
}

}  // namespace tessera::checkpoint
