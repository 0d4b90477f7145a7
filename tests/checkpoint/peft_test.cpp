// Adapters of a checkpoint: alone in PEFT's format and back, and added to the weights they were trained beside.

#include "tessera/checkpoint/peft.h"

#include <fstream>
#include <functional>
#include <iterator>

#include <ATen/ops/mm.h>
#include <ATen/ops/randn.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tessera/checkpoint/hugging_face.h"
#include "tessera/checkpoint/json_file.h"
#include "tessera/checkpoint/safetensors.h"
#include "tessera/comm/testing.h"
#include "tessera/core/error.h"
#include "tests/checkpoint/files.h"

namespace tessera::checkpoint {
namespace {

namespace fs = std::filesystem;
using testing::HasSubstr;
using testing::ThrowsMessage;

constexpr int64_t kRank = 2;
constexpr double kAlpha = 3;

class Peft : public ::testing::Test {
 protected:
  /// Every weight of the model; beside `adapted` (each layer's) an A and a B.
  void draw(const std::string& family, const std::vector<std::string>& adapted) {
    model_.family = family;
    model_.dim = 12;
    model_.layers = 2;
    model_.heads = 3;
    model_.kv_heads = family == "llama" ? 1 : 3;
    model_.ffn_dim = 20;
    model_.vocab_size = 17;
    model_.max_seq_len = 8;
    model_.tie_embeddings = false;
    lora_.rank = kRank;
    lora_.alpha = kAlpha;
    const auto table = hugging_face_table(model_).value();
    for (const auto& row : table) {
      weights_[row.ours] = at::randn(row.shape);
      for (const auto& layer : adapted) {
        if (!row.ours.ends_with("." + layer + ".weight")) continue;
        const std::string path = row.ours.substr(0, row.ours.size() - 6);
        weights_[path + "lora_a"] = at::randn({kRank, row.shape[1]});
        weights_[path + "lora_b"] = at::randn({row.shape[0], kRank});
      }
    }
  }

  /// With `rounded`, adapters are kept in bf16, beside the masters that they are a rounding of.
  fs::path save_by(int ranks, bool rounded = false) const {
    comm::run_ranks(ranks, [&](comm::World& world) {
      CheckpointState state;
      state.step = 4;
      const auto add = [&](const std::string& name, const at::Tensor& whole) {
        const auto [begin, size] = chunk(whole.size(0), ranks, world.rank());
        state.tensors.push_back({whole.narrow(0, begin, size), Slice::along(name, whole.sizes().vec(), 0, begin, size)});
      };
      for (const auto& [name, whole] : weights_) {
        const bool has_master = rounded && name.find(".lora_") != std::string::npos;
        add("model." + name, has_master ? whole.to(at::kBFloat16) : whole);
        if (has_master) add("optimizer.master." + name, whole);
      }
      save(folder_.path(), state, world.group());
    });
    return folder_ / "step-00000004";
  }

  std::vector<SlicedTensor> adapters() const {
    std::vector<SlicedTensor> targets;
    for (const auto& [name, whole] : weights_) {
      if (name.find(".lora_") != std::string::npos) targets.push_back({at::empty_like(whole), Slice::whole(name, whole.sizes().vec())});
    }
    return targets;
  }

  TemporaryFolder folder_;
  ModelConfig model_;
  LoraConfig lora_;
  std::map<std::string, at::Tensor> weights_;
};

TEST_F(Peft, WhatWasWrittenReadsBackFromAnyLayout) {
  draw("llama", {"attention.wq", "feed_forward.w2"});
  const auto exported = export_peft(save_by(3), model_, lora_, folder_ / "peft");
  EXPECT_EQ(exported.tensors, 8);
  const SafetensorsFile file(folder_ / "peft" / "adapter_model.safetensors");
  EXPECT_TRUE(file.entries().contains("base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight"));
  EXPECT_EQ(file.entry("base_model.model.model.layers.0.mlp.down_proj.lora_B.weight").shape, (std::vector<int64_t>{12, kRank}));
  const auto targets = adapters();
  load_peft(folder_ / "peft", model_, lora_, targets);
  for (const auto& target : targets) EXPECT_TRUE(at::equal(target.tensor, weights_.at(target.slice.name))) << target.slice.name;
}

TEST_F(Peft, AdaptersAreWidenedFromTheirMasters) {
  draw("llama", {"attention.wq"});
  const auto checkpoint = save_by(2, /*rounded=*/true);
  export_peft(checkpoint, model_, lora_, folder_ / "peft", {.dtype = at::kFloat});
  const auto targets = adapters();
  load_peft(folder_ / "peft", model_, lora_, targets);
  for (const auto& target : targets) EXPECT_TRUE(at::equal(target.tensor, weights_.at(target.slice.name))) << target.slice.name;

  export_hugging_face(checkpoint, model_, folder_ / "merged", {.dtype = at::kFloat, .lora_scale = kAlpha / kRank});
  const std::string wq = "layers.1.attention.wq.";
  const at::Tensor weight = weights_.at(wq + "weight"), merged = at::empty_like(weight);
  load_hugging_face(folder_ / "merged", model_, {{merged, Slice::whole(wq + "weight", weight.sizes().vec())}});
  EXPECT_TRUE(at::equal(merged, weight.add(at::mm(weights_.at(wq + "lora_b"), weights_.at(wq + "lora_a")), kAlpha / kRank)));
}

TEST_F(Peft, IsLookedAtBeforeItIsRead) {
  const auto refused = [&](const std::filesystem::path& folder, const std::string& words) {
    EXPECT_THAT([&] { check_peft(folder, lora_); }, ThrowsMessage<ConfigError>(HasSubstr(words)));
  };
  draw("llama", {"attention.wq"});
  refused(folder_ / "gone", "there is no such folder");
  refused(folder_.path(), "holds no adapter_config.json");
  export_peft(save_by(1), model_, lora_, folder_ / "peft");
  check_peft(folder_ / "peft", lora_);
  lora_.rank = 7;
  refused(folder_ / "peft", "set lora.rank = ");
  lora_.rank = kRank;
  std::filesystem::remove(folder_ / "peft" / "adapter_model.safetensors");
  refused(folder_ / "peft", "holds no adapter_model.safetensors");
}

TEST_F(Peft, RefusesAdaptersThatAreBroken) {
  draw("llama", {"attention.wq"});
  export_peft(save_by(1), model_, lora_, folder_ / "peft");
  const fs::path config = folder_ / "peft" / "adapter_config.json", weights = folder_ / "peft" / "adapter_model.safetensors";
  const nlohmann::json sound = read_json(config);
  const auto refused = [&](const std::string& words) {
    EXPECT_THAT([&] { load_peft(folder_ / "peft", model_, lora_, adapters()); }, ThrowsMessage<ConfigError>(HasSubstr(words))) << words;
  };
  const auto with = [&](const char* key, const nlohmann::json& value, const std::string& words) {
    nlohmann::json broken = sound;
    broken[key] = value;
    std::ofstream(config) << broken.dump();
    refused(words);
  };
  for (const nlohmann::json& rank : {nlohmann::json(0), nlohmann::json(-4), nlohmann::json(4.5), nlohmann::json(1e300)}) with("r", rank, "is no rank");
  with("r", 3, "set lora.rank = 3");
  with("target_modules", {"k_proj"}, "does not name 'model.layers.0.self_attn.q_proj'");
  with("target_modules", 7, "neither a list nor a string");
  with("target_modules", ".*k_proj", "does not name 'model.layers.0.self_attn.q_proj'");
  with("target_modules", "q_proj", "does not name 'model.layers.0.self_attn.q_proj'");  // it is matched with whole paths
  with("target_modules", "(?P<x>.*q_proj", "is a regular expression that is not understood here");
  with("layers_to_transform", {0}, "layers_to_transform = [0] is not supported");
  with("alora_invocation_tokens", {1, 2}, "alora_invocation_tokens = [1,2] is nothing that plain LoRA has");
  with("arrow_config", {{"top_k", 3}}, R"(arrow_config = {"top_k":3} is nothing that plain LoRA has)");
  with("init_lora_weights", "pissa", "init_lora_weights = \"pissa\" is not supported: it changes the model's weights, too");

  nlohmann::json by_its_end = sound;
  by_its_end["target_modules"] = {"q_proj"};
  by_its_end["init_lora_weights"] = "gaussian";
  std::ofstream(config) << by_its_end.dump();
  load_peft(folder_ / "peft", model_, lora_, adapters());
  for (const char* pattern : {"all-linear", R"(model\.layers\.\d+\.self_attn\.(q|v)_proj)", ".*q_proj"}) {
    by_its_end["target_modules"] = pattern;
    std::ofstream(config) << by_its_end.dump();
    load_peft(folder_ / "peft", model_, lora_, adapters());
  }

  std::string bytes;
  {
    std::ifstream in(weights, std::ios::binary);
    bytes.assign(std::istreambuf_iterator<char>(in), {});
  }
  const auto wrote = [&](const std::string& changed) { std::ofstream(weights, std::ios::binary) << changed; };
  std::string integers = bytes;
  integers.replace(integers.find("\"F32\""), 5, "\"I32\"");
  wrote(integers);
  refused("which are no weights");
  std::string not_finite = bytes;
  not_finite.replace(not_finite.size() - 4, 4, std::string("\x00\x00\xc0\x7f", 4));
  wrote(not_finite);
  refused("are not finite");
}

TEST_F(Peft, ItsConfigurationSaysWhatPeftAsks) {
  draw("gpt2", {"attention.wo"});
  export_peft(save_by(1), model_, lora_, folder_ / "peft");
  const auto config = read_json(folder_ / "peft" / "adapter_config.json");
  EXPECT_EQ(config.at("peft_type"), "LORA");
  EXPECT_EQ(config.at("r"), kRank);
  EXPECT_EQ(config.at("lora_alpha"), kAlpha);
  EXPECT_EQ(config.at("fan_in_fan_out"), true);
  EXPECT_EQ(config.at("target_modules"), (nlohmann::json{"transformer.h.0.attn.c_proj", "transformer.h.1.attn.c_proj"}));
}

TEST_F(Peft, MergedWeightsAreTheSum) {
  for (const std::string family : {"llama", "gpt2"}) {
    weights_.clear();
    fs::remove_all(folder_ / "hf");
    fs::remove_all(folder_ / "step-00000004");
    draw(family, {"attention.wq", "feed_forward.w2"});
    export_hugging_face(save_by(3), model_, folder_ / "hf", {.lora_scale = kAlpha / kRank});
    std::vector<SlicedTensor> targets;
    const auto table = hugging_face_table(model_).value();
    for (const auto& row : table) targets.push_back({at::empty(row.shape), Slice::whole(row.ours, row.shape)});
    load_hugging_face(folder_ / "hf", model_, targets);
    for (const auto& [tensor, slice] : targets) {
      at::Tensor expected = weights_.at(slice.name);
      const std::string path = slice.name.substr(0, slice.name.rfind('.') + 1);
      if (slice.name.ends_with(".weight") && weights_.contains(path + "lora_a")) {
        expected =
            expected.to(at::kDouble) + kAlpha / kRank * at::mm(weights_.at(path + "lora_b").to(at::kDouble), weights_.at(path + "lora_a").to(at::kDouble));
      }
      EXPECT_LT((tensor - expected).abs().max().item<double>(), 3e-6) << slice.name;
    }
  }
}

TEST_F(Peft, RefusesWhatWouldLoseAdapters) {
  draw("llama", {"attention.wq"});
  const fs::path saved = save_by(1);
  EXPECT_THAT([&] { export_hugging_face(saved, model_, folder_ / "hf"); }, ThrowsMessage<ConfigError>(HasSubstr("--merge-lora")));
  LoraConfig trained = lora_;
  trained.trained = {"norm.*"};
  EXPECT_THAT([&] { export_peft(saved, model_, trained, folder_ / "peft"); }, ThrowsMessage<ConfigError>(HasSubstr("'norm.*' (lora.trained)")));
  export_peft(saved, model_, lora_, folder_ / "peft");
  LoraConfig other = lora_;
  other.rank = 4;
  EXPECT_THAT([&] { load_peft(folder_ / "peft", model_, other, adapters()); }, ThrowsMessage<ConfigError>(HasSubstr("set lora.rank = 2")));
  other = lora_;
  other.alpha = 16;
  EXPECT_THAT([&] { load_peft(folder_ / "peft", model_, other, adapters()); }, ThrowsMessage<ConfigError>(HasSubstr("set lora.alpha = 3")));
  auto fewer = adapters();
  fewer.pop_back();
  EXPECT_THAT([&] { load_peft(folder_ / "peft", model_, lora_, fewer); }, ThrowsMessage<ConfigError>(HasSubstr("extra base_model.model")));
}

TEST_F(Peft, RefusesWithoutAdapters) {
  draw("llama", {});
  const fs::path saved = save_by(1);
  EXPECT_THAT([&] { export_peft(saved, model_, lora_, folder_ / "peft"); }, ThrowsMessage<ConfigError>(HasSubstr("holds no adapters")));
  EXPECT_THAT([&] { export_hugging_face(saved, model_, folder_ / "hf", {.lora_scale = 1}); }, ThrowsMessage<ConfigError>(HasSubstr("holds no adapters")));
}

TEST_F(Peft, RefusesModelsThatTheirsAreNot) {
  draw("llama", {"attention.wq"});
  const fs::path saved = save_by(1);
  ModelConfig other = model_;
  other.family = "mixtral", other.experts = 2, other.router = "sigmoid";
  EXPECT_THAT([&] { export_peft(saved, other, lora_, folder_ / "peft"); },
              ThrowsMessage<ConfigError>(HasSubstr("model.router = sigmoid: their Mixtral routes by softmax; there are no adapters of it")));
  other.family = "mlp";
  EXPECT_THAT([&] { export_peft(saved, other, lora_, folder_ / "peft"); },
              ThrowsMessage<ConfigError>(HasSubstr("model.family = mlp: Hugging Face has no such model, so there are no adapters of it")));
}

TEST_F(Peft, RefusesLayersThatAreOneThere) {
  draw("gpt2", {"attention.wq"});
  const fs::path saved = save_by(1);
  EXPECT_THAT([&] { export_peft(saved, model_, lora_, folder_ / "peft"); }, ThrowsMessage<ConfigError>(HasSubstr("which PEFT adapts as one")));
}

/// PEFT loads them beside what lies in the folder that they name.
TEST_F(Peft, NameAFolderOnceItHoldsWhatTheyWereTrainedBeside) {
  draw("llama", {"attention.wq"});
  const auto all = weights_;
  std::erase_if(weights_, [](const auto& each) { return each.first.find(".lora_") != std::string::npos; });
  for (const std::string name : {"base", "other"}) {
    const fs::path whole = save_by(1);
    export_hugging_face(whole, model_, folder_ / name);
    fs::remove_all(whole);
    at::Tensor& weight = weights_.at("layers.1.feed_forward.w2.weight");
    weight = weight.clone();
    weight[3][4] += 1;
  }
  weights_ = all;
  const fs::path saved = save_by(2);

  model_.from_hf = (folder_ / "other").string();
  EXPECT_THAT(
      [&] { export_peft(saved, model_, lora_, folder_ / "peft"); },
      ThrowsMessage<ConfigError>(testing::AllOf(HasSubstr("model.from_hf = " + model_.from_hf + ": its model.layers.1.mlp.down_proj.weight is not what"),
                                                HasSubstr("--set model.from_hf=DIR"))));
  EXPECT_FALSE(fs::exists(folder_ / "peft"));
  model_.from_hf = (folder_ / "base").string();
  EXPECT_TRUE(export_peft(saved, model_, lora_, folder_ / "peft").remarks.empty());
  EXPECT_EQ(read_json(folder_ / "peft" / "adapter_config.json").at("base_model_name_or_path"), model_.from_hf);
}

/// As runs leave it whose precision.params became wider on the way.
TEST_F(Peft, NameAFolderOfWhichARoundingWasTrainedBeside) {
  draw("llama", {"attention.wq"});
  const auto all = weights_;
  std::erase_if(weights_, [](const auto& each) { return each.first.find(".lora_") != std::string::npos; });
  const fs::path whole = save_by(1);
  export_hugging_face(whole, model_, folder_ / "base");
  fs::remove_all(whole);
  model_.from_hf = (folder_ / "base").string();
  const auto remarks_where = [&](const std::function<at::Tensor(const at::Tensor&)>& rounded, const std::string& out) {
    weights_ = all;
    for (auto& [name, weight] : weights_) weight = name.find(".lora_") == std::string::npos ? rounded(weight) : weight;
    const fs::path saved = save_by(1);
    const auto exported = export_peft(saved, model_, lora_, folder_ / out);
    fs::remove_all(saved);
    EXPECT_EQ(read_json(folder_ / out / "adapter_config.json").at("base_model_name_or_path"), model_.from_hf);
    return exported.remarks;
  };
  using testing::ElementsAre;
  EXPECT_THAT(remarks_where([](const at::Tensor& weight) { return weight.to(at::kBFloat16).to(at::kFloat); }, "bf16"),
              ElementsAre(HasSubstr("as precision.params had rounded them, to bf16 (")));
  EXPECT_THAT(remarks_where([](const at::Tensor& weight) { return weight.to(at::kHalf).to(at::kFloat); }, "fp16"),
              ElementsAre(HasSubstr("as precision.params had rounded them, to fp16 (")));
  EXPECT_THAT(remarks_where([](const at::Tensor& weight) { return weight.to(at::kHalf).to(at::kBFloat16); }, "stored as bf16"),
              ElementsAre(HasSubstr("as precision.params had rounded them, to fp16 (")));
  EXPECT_THAT(remarks_where([](const at::Tensor& weight) { return weight.to(at::kHalf).to(at::kBFloat16).to(at::kFloat); }, "both"),
              ElementsAre(HasSubstr("as precision.params had rounded them, to fp16 and then to bf16 (")));
  EXPECT_THAT(remarks_where([](const at::Tensor& weight) { return weight.to(at::kBFloat16); }, "as stored"), testing::IsEmpty());
  EXPECT_THAT([&] { remarks_where([](const at::Tensor& weight) { return weight.to(at::kBFloat16).to(at::kFloat) * 1.0001; }, "other"); },
              ThrowsMessage<ConfigError>(HasSubstr("is not what the adapters of")));
}

}  // namespace
}  // namespace tessera::checkpoint
