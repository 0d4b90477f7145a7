// Stacked experts against files with a tensor for each expert, and against those of transformers 5 that fuse gate and up.

#include <algorithm>
#include <set>

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tessera/checkpoint/convert.h"
#include "tessera/checkpoint/dump.h"
#include "tessera/checkpoint/hugging_face.h"
#include "tessera/checkpoint/json_file.h"
#include "tessera/comm/testing.h"
#include "tessera/core/error.h"
#include "tests/checkpoint/hugging_face_files.h"

namespace tessera::checkpoint {
namespace {

namespace fs = std::filesystem;
using testing::HasSubstr;
using testing::ThrowsMessage;

constexpr int64_t kExperts = 3, kDim = 8, kFfn = 5;

nlohmann::json mixtral_config() {
  auto config = llama_config();
  config["architectures"] = {"MixtralForCausalLM"};
  config["model_type"] = "mixtral";
  config["num_hidden_layers"] = 1;
  config["intermediate_size"] = kFfn;
  config["num_local_experts"] = kExperts;
  config["num_experts_per_tok"] = 2;
  config["sliding_window"] = nullptr;
  config["router_jitter_noise"] = 0.0;
  return config;
}

/// A tensor for each expert.
Tensors mixtral_tensors() {
  at::manual_seed(4);
  const std::string layer = "model.layers.0.", experts = layer + "block_sparse_moe.experts.";
  Tensors tensors{{"model.embed_tokens.weight", at::randn({11, kDim})},
                  {"model.norm.weight", at::randn({kDim})},
                  {"lm_head.weight", at::randn({11, kDim})},
                  {layer + "self_attn.q_proj.weight", at::randn({kDim, kDim})},
                  {layer + "self_attn.k_proj.weight", at::randn({4, kDim})},
                  {layer + "self_attn.v_proj.weight", at::randn({4, kDim})},
                  {layer + "self_attn.o_proj.weight", at::randn({kDim, kDim})},
                  {layer + "input_layernorm.weight", at::randn({kDim})},
                  {layer + "post_attention_layernorm.weight", at::randn({kDim})},
                  {layer + "block_sparse_moe.gate.weight", at::randn({kExperts, kDim})}};
  for (int64_t e = 0; e < kExperts; ++e) {
    tensors[experts + std::to_string(e) + ".w1.weight"] = at::randn({kFfn, kDim});
    tensors[experts + std::to_string(e) + ".w2.weight"] = at::randn({kDim, kFfn});
    tensors[experts + std::to_string(e) + ".w3.weight"] = at::randn({kFfn, kDim});
  }
  return tensors;
}

/// The same as transformers 5 names and stacks them in memory.
Tensors fused(const Tensors& tensors) {
  Tensors all;
  std::vector<at::Tensor> gate_up, down;
  for (const auto& [name, tensor] : tensors) {
    if (name.find(".experts.") != std::string::npos) continue;
    const size_t at = name.find("block_sparse_moe.gate");
    all[at == std::string::npos ? name : name.substr(0, at) + "mlp.gate.weight"] = tensor;
  }
  for (int64_t e = 0; e < kExperts; ++e) {
    const std::string expert = "model.layers.0.block_sparse_moe.experts." + std::to_string(e);
    gate_up.push_back(at::cat({tensors.at(expert + ".w1.weight"), tensors.at(expert + ".w3.weight")}));
    down.push_back(tensors.at(expert + ".w2.weight"));
  }
  all["model.layers.0.mlp.experts.gate_up_proj"] = at::stack(gate_up);
  all["model.layers.0.mlp.experts.down_proj"] = at::stack(down);
  return all;
}

ModelConfig write_model(const fs::path& dir, const Tensors& tensors) {
  fs::create_directories(dir);
  write_all(dir / "config.json", mixtral_config().dump());
  write_safetensors(dir / "model.safetensors", tensors);
  Config config;
  config.model.from_hf = dir.string();
  return read_hugging_face_config(config);
}

/// Our stack of one of an expert's weights.
at::Tensor stacked(const Tensors& tensors, const std::string& weight) {
  std::vector<at::Tensor> experts;
  for (int64_t e = 0; e < kExperts; ++e)
    experts.push_back(tensors.at("model.layers.0.block_sparse_moe.experts." + std::to_string(e) + "." + weight + ".weight"));
  return at::cat(experts);
}

at::Tensor loaded(const fs::path& dir, const ModelConfig& model, const std::string& name, const Slice& slice) {
  const at::Tensor target = at::zeros(slice.local_shape());
  load_hugging_face(dir, model, {{target, slice}});
  return target;
}

TEST(HuggingFaceMixtral, ReadsTheConfiguration) {
  const TemporaryFolder folder;
  const ModelConfig model = write_model(folder / "hf", mixtral_tensors());
  EXPECT_EQ(model.family, "mixtral");
  EXPECT_EQ(model.experts, kExperts);
  EXPECT_EQ(model.experts_per_token, 2);
  EXPECT_EQ(model.ffn_dim, kFfn);
  EXPECT_EQ(model.sliding_window, 0);
  Config again;
  again.model.from_hf = (folder / "hf").string();
  auto no_theta = mixtral_config();
  no_theta.erase("rope_theta");
  for (const auto& rope : {nlohmann::json(), nlohmann::json{{"rope_type", "default"}}}) {
    no_theta["rope_parameters"] = rope;
    write_all(folder / "hf" / "config.json", no_theta.dump());
    EXPECT_EQ(read_hugging_face_config(again).rope_theta, 1e6) << rope;
  }
  no_theta["rope_parameters"] = {{"rope_type", "default"}, {"rope_theta", 7.0}};
  write_all(folder / "hf" / "config.json", no_theta.dump());
  EXPECT_EQ(read_hugging_face_config(again).rope_theta, 7);
  auto jitter = mixtral_config();
  jitter["router_jitter_noise"] = 0.1;
  write_all(folder / "hf" / "config.json", jitter.dump());
  Config config;
  config.model.from_hf = (folder / "hf").string();
  EXPECT_THAT([&] { read_hugging_face_config(config); }, ThrowsMessage<ConfigError>(HasSubstr("router_jitter_noise = 0.1 is not supported")));
  auto windowed = mixtral_config();
  windowed["sliding_window"] = 6;
  write_all(folder / "hf" / "config.json", windowed.dump());
  EXPECT_EQ(read_hugging_face_config(config).sliding_window, 6);
}

/// 8 where the key is left out, as their class takes it; null is as many as heads.
TEST(HuggingFaceMixtral, KeyHeadsThatAreLeftOutAreTheirs) {
  const TemporaryFolder folder;
  fs::create_directories(folder / "hf");
  Config config;
  config.model.from_hf = (folder / "hf").string();
  const auto key_heads = [&](const nlohmann::json& file) {
    write_all(folder / "hf" / "config.json", file.dump());
    return read_hugging_face_config(config).kv_heads.value();
  };
  auto file = mixtral_config();
  file["hidden_size"] = 64;
  file["num_attention_heads"] = 16;
  file["num_key_value_heads"] = 4;
  EXPECT_EQ(key_heads(file), 4);
  file["num_key_value_heads"] = nullptr;
  EXPECT_EQ(key_heads(file), 16);
  file.erase("num_key_value_heads");
  EXPECT_EQ(key_heads(file), 8);
}

TEST(HuggingFaceMixtral, ExpertsThatAreLeftOutAreTheirs) {
  const TemporaryFolder folder;
  fs::create_directories(folder / "hf");
  Config config;
  config.model.from_hf = (folder / "hf").string();
  auto file = mixtral_config();
  file.erase("num_experts_per_tok");
  file.erase("num_local_experts");
  write_all(folder / "hf" / "config.json", file.dump());
  const ModelConfig model = read_hugging_face_config(config);
  EXPECT_EQ(model.experts, 8);
  EXPECT_EQ(model.experts_per_token, 2);
  file["num_experts_per_tok"] = nullptr;
  write_all(folder / "hf" / "config.json", file.dump());
  EXPECT_THAT([&] { read_hugging_face_config(config); }, ThrowsMessage<ConfigError>(HasSubstr("num_experts_per_tok is missing")));
}

TEST(HuggingFaceMixtral, StacksExpertsFromFilesOfBothKinds) {
  const Tensors tensors = mixtral_tensors();
  for (const bool of_transformers_5 : {false, true}) {
    const TemporaryFolder folder;
    const ModelConfig model = write_model(folder / "hf", of_transformers_5 ? fused(tensors) : tensors);
    for (const std::string weight : {"w1", "w2", "w3"}) {
      const at::Tensor whole = stacked(tensors, weight);
      const std::string name = "layers.0.feed_forward.experts." + weight;
      EXPECT_TRUE(at::equal(loaded(folder / "hf", model, name, Slice::whole(name, whole.sizes().vec())), whole)) << name;
      // Rows that begin in the midst of one expert and end in another's.
      const Slice some = Slice::along(name, whole.sizes().vec(), 0, 3, whole.size(0) - 5);
      EXPECT_TRUE(at::equal(loaded(folder / "hf", model, name, some), whole.narrow(0, 3, whole.size(0) - 5))) << name;
    }
    const std::string router = "layers.0.feed_forward.router.weight";
    EXPECT_TRUE(
        at::equal(loaded(folder / "hf", model, router, Slice::whole(router, {kExperts, kDim})), tensors.at("model.layers.0.block_sparse_moe.gate.weight")));
  }
}

std::vector<SlicedTensor> all_of(const fs::path& dir, const ModelConfig& model) {
  std::vector<SlicedTensor> targets;
  std::set<std::string> seen;
  const auto table = hugging_face_table(model).value();
  for (const auto& row : table) {
    if (seen.insert(row.ours).second) targets.push_back({at::empty(row.whole_shape()), Slice::whole(row.ours, row.whole_shape())});
  }
  load_hugging_face(dir, model, targets);
  return targets;
}

TEST(HuggingFaceMixtral, DumpsAndConvertsToATensorForEachExpert) {
  const TemporaryFolder folder;
  const Tensors tensors = mixtral_tensors();
  const ModelConfig model = write_model(folder / "hf", tensors);
  const auto whole = all_of(folder / "hf", model);
  comm::run_ranks(2, [&](comm::World& world) {
    std::vector<SlicedTensor> mine;
    CheckpointState state;
    state.step = 4;
    for (const auto& [tensor, slice] : whole) {
      const auto [begin, size] = chunk(tensor.size(0), 2, world.rank());
      mine.push_back({tensor.narrow(0, begin, size), Slice::along(slice.name, slice.shape, 0, begin, size)});
      state.tensors.push_back({mine.back().tensor, Slice::along("model." + slice.name, slice.shape, 0, begin, size)});
    }
    dump(folder / "dump.safetensors", model, mine, world.group());
    save(folder / "checkpoints", state, world.group());
  });
  export_hugging_face(folder / "checkpoints" / "step-00000004", model, folder / "out");
  for (const auto& file : {folder / "dump.safetensors", folder / "out" / "model.safetensors"}) {
    const Tensors written = read_safetensors(file);
    ASSERT_EQ(written.size(), tensors.size());
    for (const auto& [name, tensor] : tensors) EXPECT_TRUE(at::equal(written.at(name), tensor)) << file << " " << name;
  }
  Config reading;
  reading.model.from_hf = (folder / "out").string();
  auto read = read_hugging_face_config(reading);
  read.from_hf = model.from_hf;
  EXPECT_EQ(read, model);
}

TEST(HuggingFaceMixtral, RefusesWhatTheirModelCannotCompute) {
  const TemporaryFolder folder;
  ModelConfig model = write_model(folder / "hf", mixtral_tensors());
  model.shared_ffn_dim = 4;
  EXPECT_FALSE(hugging_face_table(model));
  EXPECT_THAT([&] { export_hugging_face(folder / "none", model, folder / "out"); }, ThrowsMessage<ConfigError>(HasSubstr("no shared expert")));
  model.shared_ffn_dim = 0;
  model.router = "sigmoid";
  EXPECT_FALSE(hugging_face_table(model));
}

TEST(Upcycling, EveryExpertIsTheDenseLayer) {
  const TemporaryFolder folder;
  fs::create_directories(folder / "hf");
  write_all(folder / "hf" / "config.json", llama_config().dump());
  write_safetensors(folder / "hf" / "model.safetensors", llama_tensors());
  Config config;
  config.model.from_hf = (folder / "hf").string();
  const ModelConfig dense = read_hugging_face_config(config);
  CheckpointState state;
  state.step = 1;
  for (const auto& [tensor, slice] : all_of(folder / "hf", dense)) state.tensors.push_back({tensor, Slice::whole("model." + slice.name, slice.shape)});
  comm::run_ranks(1, [&](comm::World& world) { save(folder / "checkpoints", state, world.group()); });
  const fs::path checkpoint = folder / "checkpoints" / "step-00000001";
  export_hugging_face(checkpoint, dense, folder / "moe", {.upcycling = Upcycling{.experts = 4, .experts_per_token = 2, .seed = 7}});

  const Tensors from = llama_tensors(), to = read_safetensors(folder / "moe" / "model.safetensors");
  for (const std::string layer : {"model.layers.0.", "model.layers.1."}) {
    for (int64_t e = 0; e < 4; ++e) {
      const std::string expert = layer + "block_sparse_moe.experts." + std::to_string(e);
      EXPECT_TRUE(at::equal(to.at(expert + ".w1.weight"), from.at(layer + "mlp.gate_proj.weight")));
      EXPECT_TRUE(at::equal(to.at(expert + ".w3.weight"), from.at(layer + "mlp.up_proj.weight")));
      EXPECT_TRUE(at::equal(to.at(expert + ".w2.weight"), from.at(layer + "mlp.down_proj.weight")));
    }
    EXPECT_NEAR(to.at(layer + "block_sparse_moe.gate.weight").std().item<double>(), 0.02, 0.01);
  }
  Config reading;
  reading.model.from_hf = (folder / "moe").string();
  EXPECT_EQ(read_hugging_face_config(reading).experts, 4);

  ModelConfig other = dense;
  other.family = "gpt2";
  EXPECT_THAT([&] { export_hugging_face(checkpoint, other, folder / "no", {.upcycling = Upcycling{}}); },
              ThrowsMessage<ConfigError>(HasSubstr("only a llama")));
  EXPECT_THAT([&] { export_hugging_face(checkpoint, dense, folder / "no", {.upcycling = Upcycling{.experts = 1}}); },
              ThrowsMessage<ConfigError>(HasSubstr("--experts-per-token = 2: expected 1 to --experts = 1")));
  EXPECT_THAT([&] { export_hugging_face(checkpoint, dense, folder / "no", {.upcycling = Upcycling{.experts = 4, .experts_per_token = 1}}); },
              ThrowsMessage<ConfigError>(HasSubstr("set --experts-per-token to 2 or more")));
  EXPECT_NO_THROW(export_hugging_face(checkpoint, dense, folder / "one", {.upcycling = Upcycling{.experts = 1, .experts_per_token = 1}}));
}

}  // namespace
}  // namespace tessera::checkpoint
