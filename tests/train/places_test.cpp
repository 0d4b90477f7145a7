// Parameters of stage 3, and state of any stage, each where a pattern says: the bits of a run on the device alone, in every setting it meets.

#include "tessera/train/places.h"

#include <gmock/gmock.h>

#include "tessera/core/error.h"
#include "tessera/train/compose.h"
#include "tests/train/fixture.h"

namespace tessera {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

class Places : public testing_support::TrainFixture {
 protected:
  using Sets = std::vector<std::string>;

  void expect_same_bits(const std::string& family, Sets sets, int world, const Sets& placed, bool stage_3 = true) const {
    SCOPED_TRACE(family + " " + ::testing::PrintToString(sets) + ::testing::PrintToString(placed) + " on " + std::to_string(world));
    sets.insert(sets.begin(), {"run.steps=3", "batch.global_size=10", "batch.micro_size=1", "run.threads=1", "optim.max_grad_norm=0.1", "model.layers=3"});
    if (stage_3) sets.insert(sets.begin(), "zero.stage=3");
    const Trace plain = train(config(family, sets), world);
    sets.insert(sets.end(), placed.begin(), placed.end());
    sets.push_back("offload.dir=" + (folder_ / "away").string());
    const Trace moved = train(config(family, sets), world);
    EXPECT_EQ(testing_support::difference(moved.gradients, plain.gradients), 0);
    EXPECT_EQ(testing_support::difference(moved.weights, plain.weights), 0);
    for (size_t i = 0; i < plain.steps.size(); ++i) {
      EXPECT_EQ(moved.steps[i].loss, plain.steps[i].loss) << "step " << i + 1;
      EXPECT_EQ(moved.steps[i].grad_norm, plain.steps[i].grad_norm) << "step " << i + 1;
      EXPECT_EQ(moved.steps[i].loss_scale.skipped, plain.steps[i].loss_scale.skipped);
    }
    const MemoryUse &here = plain.steps.back().memory, &there = moved.steps.back().memory;
    EXPECT_LT(total_of(there.current), total_of(here.current)) << "the device keeps less";
  }
  void expect_all_same(const std::string& family, const Sets& sets, int world) const {
    for (const Sets& placed : {kSomeOnDisk, kDisk}) expect_same_bits(family, sets, world, placed);
  }

  const Sets kSome{"offload.params={ \"layers.*\" = \"host\" }"};
  const Sets kSomeOnDisk{"offload.params={ \"layers.*\" = \"disk\", \"layers.1\" = \"host\" }"};
  const Sets kDisk{"offload.params=disk", "offload.gradients=disk", "offload.optimizer=disk"};
};

TEST_F(Places, SlicesAreBitForBitOnAnyNumberOfRanks) {
  for (const int world : {1, 2, 3, 5}) expect_all_same("llama", {"model.kv_heads=2"}, world);
  for (const Sets& placed : {kSome, kDisk}) expect_same_bits("gpt2", {"model.dropout=0.1", "model.tie_embeddings=true", "zero.accumulate=whole"}, 3, placed);
  expect_same_bits("gpt2", {"model.tie_embeddings=true", "zero.wrap=**"}, 2, {"offload.params={ \"head\" = \"disk\", \"layers.0\" = \"host\" }"});
  expect_same_bits("mlp", {"optim.name=sgd", "optim.momentum=0.9", "zero.prefetch=0"}, 2, kDisk);
  expect_all_same("llama", {"zero.prefetch=3", "zero.reshard_after_forward=false"}, 3);
  EXPECT_TRUE(std::filesystem::is_empty(folder_ / "away"));
}

TEST_F(Places, SlicesAreBitForBitInEveryLayout) {
  expect_same_bits("llama", {"mesh.dp_replicate=2"}, 4, kSomeOnDisk);
  expect_same_bits("llama", {"mesh.dp_replicate=2", "zero.accumulate=whole", "precision.compute=bf16", "precision.reduce=bf16"}, 4, kDisk);
  expect_all_same("llama", {"mesh.tp=2"}, 4);
  expect_all_same("llama", {"mesh.cp=2"}, 2);
  expect_all_same("gpt2", {"mesh.pp=2", "mesh.dp_shard=2", "model.tie_embeddings=true", "recompute.mode=full"}, 4);
  expect_all_same("mixtral", {"model.experts=4", "mesh.ep=2"}, 2);
  expect_same_bits("llama", {"pipeline.virtual_stages=5", "pipeline.schedule=breadth_first", "recompute.mode=full"}, 1, kDisk);
  expect_same_bits("llama", {"lora.modules=layers.*.attention.*"}, 2, kDisk);
}

TEST_F(Places, SlicesAreBitForBitInEveryPrecision) {
  const Sets masters{"precision.params=bf16", "precision.compute=bf16"};
  const Sets fp16{"precision.params=fp16", "precision.compute=fp16", "precision.reduce=fp16", "precision.loss_scale=dynamic"};
  for (const Sets& sets : {Sets{"precision.compute=bf16"}, masters, fp16}) {
    expect_same_bits("llama", sets, 1, kSomeOnDisk);
    expect_same_bits("llama", sets, 2, kDisk);
  }
  expect_all_same("llama", {"recompute.mode=full", "zero.wrap=layers.*.*", "precision.compute=bf16"}, 3);
  expect_same_bits("llama", {"recompute.mode=selective", "offload.activations=host", "offload.min_bytes=256"}, 2, kDisk);
}

TEST_F(Places, StateOfSlicesMayBeFurtherAway) {
  for (const char* optimizer : {"offload.optimizer=host", "offload.optimizer=disk", "offload.optimizer={ \"**\" = \"host\", \"layers.2\" = \"disk\" }"}) {
    Sets all = kSomeOnDisk;
    all.emplace_back(optimizer);
    expect_same_bits("llama", {"precision.params=bf16", "precision.compute=bf16"}, 2, all);
  }
}

TEST_F(Places, StateByPatternIsBitForBitAtEveryStage) {
  const Sets host{"offload.optimizer={ \"layers.*\" = \"host\" }"}, both{"offload.optimizer={ \"layers.*.attention\" = \"disk\", \"layers.*\" = \"host\" }"};
  const Sets paged{"offload.optimizer={ \"layers.*\" = \"disk\", \"head\" = \"host\" }", "offload.update=device"};
  for (const Sets& placed : {host, both, paged}) {
    for (const char* stage : {"0", "1", "3"}) {
      expect_same_bits("llama", {std::string("zero.stage=") + stage}, stage[0] == '0' ? 1 : 2, placed, /*stage_3=*/false);
    }
    expect_same_bits("gpt2", {"model.tie_embeddings=true", "mesh.pp=2", "precision.params=bf16", "precision.compute=bf16"}, 2, placed, /*stage_3=*/false);
    expect_same_bits("llama", {"optim.groups=[\"**.bias: weight_decay = 0\", \"layers.1: name = lion\"]", "zero.stage=1"}, 2, placed, /*stage_3=*/false);
  }
  for (const char* name : {"muon", "adafactor", "adam8bit"}) {
    expect_same_bits("llama", {std::string("optim.name=") + name, "zero.stage=2", "mesh.tp=2", "mesh.dp_shard=2"}, 4, host, /*stage_3=*/false);
  }
  expect_same_bits("mixtral", {"model.experts=4", "mesh.ep=2", "zero.stage=1"}, 2, both, /*stage_3=*/false);
}

TEST_F(Places, AnExceptionStaysOnTheDevice) {
  const std::string layers = "={ \"layers.*\" = \"host\", \"layers.1\" = \"device\" }",
                    inner = "={ \"layers.*\" = \"disk\", \"layers.*.attention\" = \"device\" }";
  for (const int world : {2, 3}) {
    expect_same_bits("llama", {}, world, {"offload.params" + layers});
    expect_same_bits("llama", {}, world, {"offload.params" + layers, "offload.optimizer={ \"**\" = \"host\" }"});
    expect_same_bits("llama", {"zero.stage=1"}, world, {"offload.optimizer" + inner}, /*stage_3=*/false);
  }
  expect_same_bits("llama", {"mesh.pp=2"}, 2, {"offload.optimizer" + layers}, /*stage_3=*/false);
  const auto kept = [&](const Sets& sets) {
    double device = 0;
    for (const PlacedElements& kind : count_elements(config("llama", sets)).elements) {
      if (kind.params == WaitingPlace::Device && kind.optimizer == WaitingPlace::Device) device += kind.count;
    }
    return static_cast<int64_t>(device);
  };
  const int64_t block = 4 * 24 * 24 + 3 * 24 * 40 + 2 * 24, rest = 2 * 259 * 24 + 24;
  EXPECT_EQ(kept({"model.layers=3", "zero.stage=3", "offload.params" + layers}), rest + block);
  EXPECT_EQ(kept({"model.layers=3", "offload.optimizer" + inner}), rest + 3 * 4 * 24 * 24);
  EXPECT_EQ(kept({"model.layers=3", "offload.optimizer" + layers, "offload.fraction=0.5"}), rest + 2 * block) << "the first half of those that move";
}

/// Of a tied weight a stage has one name, and the first and the last stage a copy each.
TEST_F(Places, EitherNameOfATiedWeightIsThatOfBothStages) {
  for (const auto& [stages, world] : {std::pair("mesh.pp=2", 2), std::pair("pipeline.virtual_stages=2", 1)}) {
    for (const char* name : {"head", "embed_tokens"}) {
      const Sets sets{"model.tie_embeddings=true", stages, "pipeline.schedule=breadth_first"};
      const std::string table = std::string("={ \"") + name + "\" = \"host\" }";
      expect_same_bits("llama", sets, world, {"offload.optimizer" + table}, /*stage_3=*/false);
      Sets units = sets;
      units.emplace_back("zero.wrap=**");
      expect_same_bits("llama", units, world, {"offload.params" + table});
    }
  }
}

TEST_F(Places, WhatPatternsSayIsCheckedBeforeARankBegins) {
  const auto refusal = [&](const Sets& sets) -> std::string {
    try {
      const Config given = config("llama", sets);
      validate(given, 1);
      check_modules(given, mesh_shape(given.mesh, given.zero.stage, 1));
    } catch (const ConfigError& error) {
      return error.what();
    }
    return "(accepted)";
  };
  const auto params = [&](const std::string& table, Sets more = {}) {
    more.insert(more.end(), {"zero.stage=3", "offload.params=" + table});
    return refusal(more);
  };
  EXPECT_EQ(params("{ \"layers.*\" = \"host\" }"), "(accepted)");
  EXPECT_EQ(params("{ \"layers.*\" = \"host\", \"layers.1\" = \"disk\" }"), "(accepted)");
  EXPECT_THAT(params("{ \"layer.*\" = \"host\" }"), AllOf(HasSubstr("offload.params: 'layer.*' matches no module"), HasSubstr("nearest path is 'layers")));
  EXPECT_THAT(refusal({"offload.optimizer={ \"heads\" = \"host\" }"}), HasSubstr("offload.optimizer: 'heads' matches no module"));
  EXPECT_THAT(params("{ \"layers.0*\" = \"host\", \"layers.*0\" = \"disk\" }"), HasSubstr("both name 'layers.0."));
  EXPECT_THAT(params("{ \"layers.0.attention\" = \"host\" }"), AllOf(HasSubstr("are of one unit, 'layers.0'"), HasSubstr("(offload.params)")));
  EXPECT_EQ(params("{ \"layers.0.attention\" = \"host\" }", {"zero.wrap=layers.*.*"}), "(accepted)");
  EXPECT_THAT(params("{ \"layers.*\" = \"host\" }", {"offload.optimizer={ \"head\" = \"host\" }"}),
              HasSubstr("offload.optimizer: leaves the state of 'layers.0."));
  // On the device is what excepts something from another pattern.
  const std::string idle = "is no exception from any other pattern";
  EXPECT_EQ(params("{ \"layers.*\" = \"host\", \"layers.1\" = \"device\" }"), "(accepted)");
  EXPECT_THAT(params("{ \"layers.*\" = \"host\", \"head\" = \"device\" }"), HasSubstr("offload.params: 'head' = device: " + idle));
  EXPECT_THAT(refusal({"offload.optimizer={ \"layers.1\" = \"host\", \"layers.*\" = \"device\" }"}),
              HasSubstr("offload.optimizer: 'layers.*' = device: " + idle));
  EXPECT_EQ(refusal({"offload.optimizer={ \"layers.0*\" = \"host\", \"layers.*0\" = \"disk\", \"layers.0\" = \"device\" }"}), "(accepted)")
      << "which one it is an exception from does not matter";
  EXPECT_EQ(refusal({"offload.activations={ \"layers.*\" = \"host\", \"layers.1.attention\" = \"device\" }"}), "(accepted)");
  EXPECT_THAT(refusal({"offload.activations={ \"layers.0\" = \"host\", \"layers.1\" = \"device\" }"}),
              HasSubstr("offload.activations: 'layers.1' = device: " + idle));
}

TEST_F(Places, TheClosestPatternCounts) {
  ByPattern places;
  places.by_pattern = {{"**", "host"}, {"layers.*", "disk"}, {"layers.0", "host"}, {"layers.*.attention", "host"}, {"head", "disk"}};
  const auto of = [&](const std::string& name, std::vector<std::string> aliases = {}) {
    return place_of("offload.params", places, {.name = name, .tensor = {}, .aliases = std::move(aliases)});
  };
  EXPECT_EQ(of("norm.weight"), WaitingPlace::Host);
  places.by_pattern.erase("**");
  EXPECT_EQ(of("layers.1.norm.weight"), WaitingPlace::Disk);
  EXPECT_EQ(of("layers.0.norm.weight"), WaitingPlace::Host);
  EXPECT_EQ(of("layers.1.attention.wq.weight"), WaitingPlace::Host) << "the innermost";
  EXPECT_EQ(of("norm.weight"), WaitingPlace::Device);
  EXPECT_EQ(of("embedding.weight", {"head.weight"}), WaitingPlace::Disk) << "by any of its names";
}

TEST_F(Places, AFractionTakesTheFirstModulesOfAPattern) {
  const Sets third{"zero.stage=3", "model.layers=3", "offload.params={ \"layers.*\" = \"host\" }", "offload.fraction=0.34"};
  const ByPattern settled = settled_places(config("llama", third)).params;
  const auto of = [&](const std::string& name) { return place_of("offload.params", settled, {.name = name, .tensor = {}, .aliases = {}}); };
  EXPECT_EQ(of("layers.0.attention.wq.weight"), WaitingPlace::Host);
  EXPECT_EQ(of("layers.1.attention.wq.weight"), WaitingPlace::Device);
  EXPECT_EQ(of("layers.2.feed_forward.w1.weight"), WaitingPlace::Device);
  expect_same_bits("llama", {}, 2, Sets(third.begin() + 2, third.end()));
  expect_same_bits("llama", {"lora.modules=layers.*.attention.*"}, 1, {"offload.optimizer={ \"layers.*\" = \"host\" }", "offload.fraction=0.67"},
                   /*stage_3=*/false);
  const auto kinds = count_elements(config("llama", third)).elements;
  ASSERT_EQ(kinds.size(), 2);
  EXPECT_EQ(kinds[1].count, 4 * 24 * 24 + 3 * 24 * 40 + 2 * 24);
}

TEST_F(Places, ElementsAreCountedByWhereTheyWaitAndWhatTrainingKeepsOfThem) {
  const auto counted = [&](const Sets& sets) { return count_elements(config("llama", sets)).elements; };
  ASSERT_EQ(counted({"offload.optimizer=disk"}).size(), 1);
  EXPECT_EQ(counted({"offload.optimizer=disk"}).front().optimizer, WaitingPlace::Disk);
  const auto two = counted({"zero.stage=3", "offload.params={ \"layers.*\" = \"disk\" }", "offload.optimizer={ \"layers.*\" = \"host\" }", "model.layers=3"});
  ASSERT_EQ(two.size(), 2);
  const int64_t block = 4 * 24 * 24 + 3 * 24 * 40 + 2 * 24, rest = 2 * 259 * 24 + 24;
  EXPECT_EQ(two[0].params, WaitingPlace::Device);
  EXPECT_EQ(two[1].params, WaitingPlace::Disk);
  EXPECT_EQ(two[1].optimizer, WaitingPlace::Host);
  EXPECT_EQ(two[1].count, 3 * block);
  EXPECT_EQ(two[0].count, rest);
  const Sets adapted{"model.layers=3", "lora.modules=layers.*.feed_forward.*", "lora.rank=2"};
  const auto lora = counted(adapted);
  ASSERT_EQ(lora.size(), 2);
  EXPECT_FALSE(lora[0].trained);
  EXPECT_EQ(lora[0].count, 3 * block + rest);
  EXPECT_EQ(lora[1].count, 3 * 3 * 2 * (24 + 40)) << "A and B of three layers a block";
  Sets fewer = adapted;
  fewer.emplace_back("quantize.modules=layers.*.feed_forward.*");
  const CountedElements narrow = count_elements(config("llama", fewer));
  EXPECT_EQ(narrow.elements[0].count, 3 * (4 * 24 * 24 + 2 * 24) + rest);
  EXPECT_GT(narrow.quantized_bytes, 3 * 3 * 24 * 40 / 2) << "codes, and scales";
  EXPECT_LT(narrow.quantized_bytes, 3 * 3 * 24 * 40);
}

}  // namespace
}  // namespace tessera
