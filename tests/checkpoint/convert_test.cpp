#include "tessera/checkpoint/convert.h"

#include <ATen/ops/randn.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tessera/checkpoint/checkpoint.h"
#include "tessera/checkpoint/fault_point.h"
#include "tessera/checkpoint/files.h"
#include "tessera/checkpoint/hugging_face.h"
#include "tessera/checkpoint/json_file.h"
#include "tessera/checkpoint/safetensors.h"
#include "tessera/checkpoint/unfinished_folder.h"
#include "tessera/comm/testing.h"
#include "tessera/core/error.h"
#include "tests/checkpoint/files.h"

namespace tessera::checkpoint {
namespace {

namespace fs = std::filesystem;
using testing::HasSubstr;
using testing::ThrowsMessage;

ModelConfig small(const std::string& family, bool tied) {
  Config config;
  config.model.family = family;
  config.model.dim = 12;
  config.model.layers = 2;
  config.model.heads = 3;
  config.model.ffn_dim = 20;
  config.model.vocab_size = 17;
  config.model.max_seq_len = 8;
  config.model.tie_embeddings = tied;
  config.model.kv_heads = family == "llama" ? 1 : 3;
  return config.model;
}

using Weights = std::map<std::string, at::Tensor>;

Weights draw(const ModelConfig& model) {
  Weights weights;
  const auto table = hugging_face_table(model).value();
  for (const auto& row : table) weights[row.ours] = at::randn(row.shape);
  return weights;
}

/// A checkpoint that `ranks` ranks saved, each a part of the rows; with optimizer state, which Hugging Face does not take.
fs::path saved(const fs::path& dir, const Weights& weights, int ranks) {
  comm::run_ranks(ranks, [&](comm::World& world) {
    CheckpointState state;
    state.step = 4;
    for (const auto& [name, whole] : weights) {
      const auto [begin, size] = chunk(whole.size(0), ranks, world.rank());
      for (const std::string prefix : {"model.", "optimizer.exp_avg."}) {
        state.tensors.push_back({whole.narrow(0, begin, size), Slice::along(prefix + name, whole.sizes().vec(), 0, begin, size)});
      }
    }
    save(dir, state, world.group());
  });
  return dir / "step-00000004";
}

void expect_equal(const fs::path& hf, const ModelConfig& model, const Weights& weights) {
  std::vector<SlicedTensor> targets;
  for (const auto& [name, whole] : weights) targets.push_back({at::empty_like(whole), Slice::whole(name, whole.sizes().vec())});
  load_hugging_face(hf, model, targets);
  for (const auto& target : targets) EXPECT_TRUE(at::equal(target.tensor, weights.at(target.slice.name))) << target.slice.name;
}

TEST(Convert, WhatWasWrittenReadsBackFromAnyLayout) {
  for (const std::string family : {"llama", "gpt2"}) {
    for (const bool tied : {false, true}) {
      for (const int ranks : {1, 3}) {
        const TemporaryFolder folder;
        const auto model = small(family, tied);
        const auto weights = draw(model);
        const auto exported = export_hugging_face(saved(folder.path(), weights, ranks), model, folder / "hf");
        EXPECT_EQ(exported.files, 1);
        expect_equal(folder / "hf", model, weights);
        EXPECT_EQ(SafetensorsFile(folder / "hf" / "model.safetensors").entries().contains("lm_head.weight"), !tied);

        Config reading;
        reading.model.from_hf = (folder / "hf").string();
        auto read = read_hugging_face_config(reading);
        read.from_hf.clear();
        EXPECT_EQ(read, model);
      }
    }
  }
}

/// Attention's probabilities are never dropped here.
TEST(Convert, DropoutGoesWhereOursIs) {
  const TemporaryFolder folder;
  auto model = small("gpt2", true);
  model.dropout = 0.25;
  export_hugging_face(saved(folder.path(), draw(model), 1), model, folder / "hf");
  const auto config = read_json(folder / "hf" / "config.json");
  EXPECT_EQ(config["embd_pdrop"], 0.25);
  EXPECT_EQ(config["resid_pdrop"], 0.25);
  EXPECT_EQ(config["attn_pdrop"], 0.0);
}

TEST(Convert, SplitsIntoFilesWithAnIndex) {
  const TemporaryFolder folder;
  const auto model = small("llama", false);
  const auto weights = draw(model);
  const auto exported = export_hugging_face(saved(folder.path(), weights, 2), model, folder / "hf", {.max_shard_bytes = 1000});
  EXPECT_GT(exported.files, 3);
  const auto index = read_json(folder / "hf" / "model.safetensors.index.json");
  EXPECT_EQ(index["metadata"]["total_size"], exported.bytes);
  EXPECT_EQ(static_cast<int64_t>(index["weight_map"].size()), exported.tensors);
  for (const auto& entry : fs::directory_iterator(folder / "hf")) {
    if (entry.path().extension() != ".safetensors") continue;
    const SafetensorsFile file(entry.path());
    uint64_t bytes = 0;
    for (const auto& [name, tensor] : file.entries()) bytes += tensor.bytes;
    EXPECT_TRUE(bytes <= 1000 || file.entries().size() == 1) << entry.path();
  }
  expect_equal(folder / "hf", model, weights);
}

TEST(Convert, RoundsToTheDtypeThatIsAskedFor) {
  const TemporaryFolder folder;
  const auto model = small("gpt2", true);
  auto weights = draw(model);
  export_hugging_face(saved(folder.path(), weights, 1), model, folder / "hf", {.dtype = at::kBFloat16});
  for (auto& [name, tensor] : weights) tensor = tensor.to(at::kBFloat16).to(at::kFloat);
  expect_equal(folder / "hf", model, weights);
  EXPECT_EQ(read_json(folder / "hf" / "config.json")["dtype"], "bfloat16");
}

/// Weights that were kept in fewer bits are in no checkpoint.
TEST(Convert, WritesWhatIsMadeAgainAsTheOthersAreStored) {
  const TemporaryFolder folder;
  for (const std::string family : {"llama", "gpt2"}) {
    const auto model = small(family, false);
    auto weights = draw(model);
    for (auto& [name, tensor] : weights) tensor = tensor.to(at::kBFloat16);
    ExportOptions options{.remake = [kept = weights](const std::string& name) { return kept.at(name).to(at::kFloat); }};
    for (const std::string layer : {"attention.wk", "feed_forward.w2"}) {
      const std::string name = "layers.1." + layer + ".weight";
      ASSERT_EQ(weights.erase(name), 1U);
      options.remade.insert(name);
    }
    export_hugging_face(saved(folder / family, weights, 1), model, folder / (family + "-hf"), options);
    EXPECT_EQ(read_json(folder / (family + "-hf") / "config.json")["dtype"], "bfloat16");
    const SafetensorsFile file(folder / (family + "-hf") / "model.safetensors");
    for (const auto& [name, entry] : file.entries()) EXPECT_EQ(entry.dtype, at::kBFloat16) << name;
  }
}

TEST(Convert, RefusesNumbersThatItsFormatCannotHold) {
  const TemporaryFolder folder;
  const auto model = small("llama", false);
  auto weights = draw(model);
  weights.at("layers.1.attention.wq.weight")[2][3] = -70000;
  const auto checkpoint = saved(folder.path(), weights, 2);
  EXPECT_THAT([&] { export_hugging_face(checkpoint, model, folder / "hf", {.dtype = at::kHalf}); },
              ThrowsMessage<ConfigError>(testing::AllOf(HasSubstr("--dtype fp16: layers.1.attention.wq.weight of "), HasSubstr(" holds 70000"),
                                                        HasSubstr("ends at 65504"), HasSubstr("--dtype bf16"))));
  EXPECT_FALSE(fs::exists(folder / "hf"));
  export_hugging_face(checkpoint, model, folder / "bf16", {.dtype = at::kBFloat16});
  weights.at("layers.1.attention.wq.weight")[2][3] = 65510;  // which is rounded to what it holds
  const TemporaryFolder within;
  export_hugging_face(saved(within.path(), weights, 1), model, within / "hf", {.dtype = at::kHalf});
}

/// What was trained is the masters, of which weights in 16 bits are a rounding; unless they are one update ahead, or somebody has written the weights since.
TEST(Convert, WidensWeightsFromTheirMasters) {
  const TemporaryFolder folder;
  const auto model = small("llama", false);
  const auto masters = draw(model);
  Weights stored, expected = masters;
  for (const auto& [name, master] : masters) stored[name] = master.to(at::kBFloat16);
  const std::string delayed = "layers.1.attention.wq.weight", alone = "norm.weight";
  expected[delayed] = stored.at(delayed).to(at::kFloat);
  expected[alone] = stored.at(alone).to(at::kFloat);
  const std::string written = "layers.0.attention.wk.weight";
  stored.at(written)[1].fill_(0.125);
  expected[written] = masters.at(written).clone();
  expected.at(written)[1].fill_(0.125);
  comm::run_ranks(2, [&](comm::World& world) {
    CheckpointState state;
    state.step = 4;
    const auto add = [&](const std::string& prefix, const std::string& name, const at::Tensor& whole) {
      const auto [begin, size] = chunk(whole.size(0), 2, world.rank());
      state.tensors.push_back({whole.narrow(0, begin, size), Slice::along(prefix + name, whole.sizes().vec(), 0, begin, size)});
    };
    for (const auto& [name, weight] : stored) {
      add("model.", name, weight);
      if (name != alone) add("optimizer.master.", name, masters.at(name));
      if (name == delayed) add("optimizer.next.", name, weight);
    }
    save(folder.path(), state, world.group());
  });
  const auto checkpoint = folder / "step-00000004";
  export_hugging_face(checkpoint, model, folder / "wide", {.dtype = at::kFloat});
  expect_equal(folder / "wide", model, expected);
  export_hugging_face(checkpoint, model, folder / "as-stored");
  for (auto& [name, weight] : stored) weight = weight.to(at::kFloat);
  expect_equal(folder / "as-stored", model, stored);
}

TEST(Convert, WritesALlamaWithAWindowAsMistral) {
  const TemporaryFolder folder;
  auto model = small("llama", false);
  model.sliding_window = 3;
  const auto weights = draw(model);
  export_hugging_face(saved(folder.path(), weights, 1), model, folder / "hf");
  const auto config = read_json(folder / "hf" / "config.json");
  EXPECT_EQ(config["architectures"], nlohmann::json({"MistralForCausalLM"}));
  EXPECT_EQ(config["model_type"], "mistral");
  EXPECT_EQ(config["sliding_window"], 3);
  expect_equal(folder / "hf", model, weights);
  Config reading;
  reading.model.from_hf = (folder / "hf").string();
  EXPECT_EQ(read_hugging_face_config(reading).sliding_window, 3);
}

/// Without an id that ends a text, a generate of transformers never does.
TEST(Convert, SaysAtWhichIdsTextsBeginAndEnd) {
  const TemporaryFolder folder;
  for (const std::string family : {"llama", "gpt2"}) {
    auto model = small(family, true);
    const auto checkpoint = saved(folder / family, draw(model), 1);
    int exported = 0;
    const auto written = [&](const ExportOptions& options) {
      const auto out = folder / (family + std::to_string(exported++));
      export_hugging_face(checkpoint, model, out, options);
      return std::pair(read_json(out / "config.json"), fs::exists(out / "generation_config.json") ? read_text_file(out / "generation_config.json", 100) : "");
    };
    bool readable = false;
    TextIds ids{.bos = 5, .ends = {6}};
    const ExportOptions known{.text_ids = [&](bool folder) {
      EXPECT_EQ(folder, readable);
      return ids;
    }};
    EXPECT_EQ(written({}).first.at("eos_token_id"), nullptr);
    EXPECT_EQ(written(known).first.at("bos_token_id"), 5);
    EXPECT_EQ(written(known).first.at("eos_token_id"), 6);

    const auto origin = folder / (family + "-origin");
    model.from_hf = origin.string();
    EXPECT_EQ(written(known).first.at("eos_token_id"), 6) << "the folder is gone";
    fs::create_directory(origin);
    write_all(origin / "config.json", R"({"bos_token_id": 1, "eos_token_id": [2, 3], "pad_token_id": 0})");
    readable = true;
    EXPECT_EQ(written(known).second, "");
    write_all(origin / "generation_config.json", R"({"top_k": 7, "eos_token_id": 2})");
    ids.ends = {2, 3};
    const auto [config, generation] = written(known);
    EXPECT_EQ(config.at("bos_token_id"), 1);
    EXPECT_EQ(config.at("eos_token_id"), nlohmann::json({2, 3}));
    EXPECT_EQ(config.at("pad_token_id"), 0);
    EXPECT_EQ(nlohmann::json::parse(generation), nlohmann::json({{"top_k", 7}, {"eos_token_id", {2, 3}}})) << "as that comes before config.json there";
    ids.ends = {2};
    EXPECT_EQ(written(known).first.at("eos_token_id"), 2);
    EXPECT_EQ(written(known).second, R"({"top_k": 7, "eos_token_id": 2})") << "as it was";
    ids.ends = {};
    EXPECT_EQ(written(known).first.at("eos_token_id"), nlohmann::json({2, 3})) << "nobody knows more than the folder";
    EXPECT_EQ(written({}).first.at("eos_token_id"), nlohmann::json({2, 3}));
    EXPECT_EQ(written(known).second, R"({"top_k": 7, "eos_token_id": 2})");

    ids = {.bos = 5, .ends = {6, 9}, .folders = false};  // by another tokenizer
    const auto [others, none] = written(known);
    EXPECT_EQ(others.at("bos_token_id"), 5);
    EXPECT_EQ(others.at("eos_token_id"), nlohmann::json({6, 9}));
    EXPECT_FALSE(others.contains("pad_token_id"));
    EXPECT_EQ(none, "");

    ids = {.bos = 5, .ends = {}};
    write_all(origin / "config.json", R"({"eos_token_id": null})");
    EXPECT_EQ(written(known).first.at("eos_token_id"), nullptr) << "as it was";
    EXPECT_FALSE(written(known).first.contains("bos_token_id")) << "their class has one of its own";
    ids.ends = {6};
    EXPECT_EQ(written(known).first.at("eos_token_id"), 6);
    write_all(origin / "config.json", R"({"eos_token_id": "two"})");
    readable = false;
    EXPECT_EQ(written(known).first.at("bos_token_id"), 5) << "as where the folder is gone";
  }
}

TEST(Convert, RefusesWhatItCannotWrite) {
  const TemporaryFolder folder;
  const auto model = small("llama", false);
  auto weights = draw(model);
  weights.erase("norm.weight");
  weights["head.weight"] = at::randn({3, 3});
  const auto checkpoint = saved(folder.path(), weights, 1);
  EXPECT_THAT([&] { export_hugging_face(checkpoint, model, folder / "hf"); },
              ThrowsMessage<ConfigError>(testing::AllOf(HasSubstr("missing model.norm.weight"), HasSubstr("shape of head.weight"))));
  EXPECT_FALSE(fs::exists(folder / "hf"));
  EXPECT_THAT([&] { export_hugging_face(checkpoint, model, folder.path()); }, ThrowsMessage<ConfigError>(HasSubstr("exists already")));
  auto mlp = model;
  mlp.family = "mlp";
  EXPECT_THAT([&] { export_hugging_face(checkpoint, mlp, folder / "hf"); }, ThrowsMessage<ConfigError>(HasSubstr("Hugging Face has no such model")));
  auto gpt2 = model;
  gpt2.family = "gpt2";
  gpt2.sliding_window = 3;
  EXPECT_THAT([&] { export_hugging_face(checkpoint, gpt2, folder / "hf"); }, ThrowsMessage<ConfigError>(HasSubstr("model.sliding_window = 3: their GPT-2")));
}

TEST(Convert, ADamagedSliceLeavesNothing) {
  const TemporaryFolder folder;
  const auto model = small("llama", false);
  const auto checkpoint = saved(folder.path(), draw(model), 1);
  const auto path = checkpoint / "rank-00000-of-00001.safetensors";
  const SafetensorsFile file(path);
  flip_byte(path, file.entry("model.norm.weight").offset);
  EXPECT_THAT([&] { export_hugging_face(checkpoint, model, folder / "hf"); }, ThrowsMessage<ConfigError>(HasSubstr("damaged")));
  for (const auto& entry : fs::directory_iterator(folder.path())) EXPECT_EQ(entry.path().filename(), "step-00000004");
}

/// Each writes into a place of its own, and one of them gets the name.
TEST(Convert, OfTwoAtOnceOneIsWholeAndTheOtherIsRefused) {
  const TemporaryFolder folder;
  const auto model = small("llama", false);
  const auto weights = draw(model), others = draw(model);
  const auto checkpoint = saved(folder / "one", weights, 1), another = saved(folder / "two", others, 1);
  bool first = true;
  const FaultPointScope meanwhile([&](std::string_view action, const fs::path& path) {  // the second runs from begin to end while the first writes
    if (action == "write" && path.string().find("model-00002") != std::string::npos && std::exchange(first, false)) {
      export_hugging_face(another, model, folder / "hf", {.max_shard_bytes = 1000});
    }
  });
  EXPECT_THAT([&] { export_hugging_face(checkpoint, model, folder / "hf", {.max_shard_bytes = 1000}); },
              ThrowsMessage<ConfigError>(HasSubstr("hf: exists by now")));
  expect_equal(folder / "hf", model, others);
  for (const auto& entry : fs::directory_iterator(folder.path())) EXPECT_FALSE(entry.path().filename().string().starts_with(".tmp")) << entry.path();
}

TEST(Convert, TakesAFolderWithASlashBehindIt) {
  const TemporaryFolder folder;
  const auto model = small("llama", false);
  const auto checkpoint = saved(folder / "run", draw(model), 1);
  export_hugging_face(checkpoint, model, folder / "hf/");
  EXPECT_TRUE(fs::exists(folder / "hf" / "config.json"));
}

TEST(Convert, RemovesWhatAKilledOneLeftAndNothingElse) {
  const TemporaryFolder folder;
  const auto model = small("llama", false);
  const auto checkpoint = saved(folder / "run", draw(model), 1);
  const auto left = folder / ".tmp-hf.4242.0123456789abcdef", theirs = folder / ".tmp-hf", another = folder / ".tmp-hf.4242.mine";
  for (const auto& path : {left, theirs, another}) {
    fs::create_directory(path);
    write_all(path / "model.safetensors", "something");
  }
  const UnfinishedFolder alive(folder / "hf");
  export_hugging_face(checkpoint, model, folder / "hf");
  EXPECT_FALSE(fs::exists(left));
  for (const auto& path : {theirs / "model.safetensors", another / "model.safetensors", alive.path()}) EXPECT_TRUE(fs::exists(path)) << path;
}

}  // namespace
}  // namespace tessera::checkpoint
