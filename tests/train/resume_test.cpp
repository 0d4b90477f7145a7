// A checkpoint of every layout goes on in every other: the state to the bit, the next steps within the bounds, and to the bit where the arithmetic is the same.

#include "tests/test_device.h"
#include "tests/train/resume_fixture.h"

namespace tessera {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using testing_support::Sets;
using testing_support::SliceCollector;
using namespace testing_support;
class Resume : public ResumeFixture {};

TEST_F(Resume, OffloadedGoesOnWithoutAndTheOtherWayAroundBitForBit) {
  const Layout host{"zero3x2 on the host", 2, {"zero.stage=3", "offload.params=host", "offload.gradients=host", "offload.optimizer=host"}};
  const Layout device{"zero3x2", 2, {"zero.stage=3"}};
  const Layout state{"zero3x2 with its state on the host", 2, {"zero.stage=3", "offload.optimizer=host"}};
  for (const Sets& sets : {Sets{}, Sets{"precision.params=bf16", "precision.compute=bf16"}}) {
    for (const Layout* layout : {&host, &device, &state}) std::filesystem::remove_all(saved(*layout));
    const auto on_host = run_saving(host, sets), on_device = run_saving(device, sets);
    expect_same_bits(stored(saved(host, kLast)), stored(saved(device, kLast)));
    for (const Layout* target : {&host, &device}) {
      expect_same_bits(loaded(*target, sets, saved(host, kSaved)), stored(saved(device, kSaved)));
      expect_goes_on(host, *target, sets, /*bound=*/0, on_device);
      expect_goes_on(device, *target, sets, /*bound=*/0, on_host);
    }
    const auto apart = run_saving(state, sets);
    expect_same_bits(stored(saved(state, kLast)), stored(saved(device, kLast)));
    expect_goes_on(state, device, sets, /*bound=*/0, on_device);
    expect_goes_on(device, state, sets, /*bound=*/0, apart);
  }
}

TEST_F(Resume, StreamedGradientsOfTwoRanksGoOnWithoutAndTheOtherWayAroundBitForBit) {
  for (const std::string stage : {"0", "2"}) {
    const std::string on_host_name = "streamed" + stage, on_device_name = "not streamed" + stage;
    const Layout streamed{on_host_name.c_str(), 2, {"zero.stage=" + stage, "offload.gradients=host", "offload.optimizer=host"}};
    const Layout device{on_device_name.c_str(), 2, {"zero.stage=" + stage}};
    const auto on_host = run_saving(streamed, {}), on_device = run_saving(device, {});
    expect_same_bits(stored(saved(streamed, kLast)), stored(saved(device, kLast)));
    expect_goes_on(streamed, device, {}, /*bound=*/0, on_device);
    expect_goes_on(device, streamed, {}, /*bound=*/0, on_host);
  }
}

TEST_F(Resume, StateGoesOnFromAnyPlaceInAnyOtherBitForBit) {
  const std::string dir = "offload.dir=" + (folder_ / "away").string();
  const std::vector<Layout> all{{"device", 1, {}},
                                {"gradients streamed, state on disk", 1, {"offload.gradients=host", "offload.optimizer=disk", dir}},
                                {"state on disk", 1, {"offload.optimizer=disk", dir}},
                                {"state on the host, updated on the device", 1, {"offload.optimizer=host", "offload.update=device"}}};
  for (const Sets& sets : {Sets{}, Sets{"precision.params=bf16", "precision.compute=bf16"}}) {
    std::vector<std::vector<StepResult>> steps;
    for (const Layout& layout : all) {
      std::filesystem::remove_all(saved(layout));
      steps.push_back(run_saving(layout, sets));
      expect_same_bits(stored(saved(layout, kLast)), stored(saved(all[0], kLast)));
    }
    for (size_t i = 0; i < all.size(); ++i) expect_goes_on(all[i], all[(i + 1) % all.size()], sets, /*bound=*/0, steps[0]);
  }
}

TEST_F(Resume, SlicesGoOnFromAnyPlaceInAnyOtherBitForBit) {
  const std::string dir = "offload.dir=" + (folder_ / "away").string(), stage = "zero.stage=3";
  const std::vector<Layout> all{{"zero3x2", 2, {stage}},
                                {"on disk", 2, {stage, "offload.params=disk", "offload.gradients=disk", "offload.optimizer=disk", dir}},
                                {"layers on the host", 2, {stage, "offload.params={ \"layers.*\" = \"host\" }"}},
                                {"one on disk", 2, {stage, "offload.params={ \"layers.*\" = \"host\", \"layers.1\" = \"disk\" }", dir}},
                                {"state by pattern", 2, {stage, "offload.optimizer={ \"layers.*\" = \"disk\", \"head\" = \"host\" }", dir}}};
  for (const Sets& sets : {Sets{}, Sets{"precision.params=bf16", "precision.compute=bf16"}}) {
    std::vector<std::vector<StepResult>> steps;
    for (const Layout& layout : all) {
      std::filesystem::remove_all(saved(layout));
      steps.push_back(run_saving(layout, sets));
      expect_same_bits(stored(saved(layout, kLast)), stored(saved(all[0], kLast)));
    }
    for (size_t i = 0; i < all.size(); ++i) expect_goes_on(all[i], all[(i + 1) % all.size()], sets, /*bound=*/0, steps[0]);
  }
}

TEST_F(Resume, ADelayedUpdateGoesOnAndBeginsLater) {
  const Layout plain{"plain", 1, {}}, host{"delayed", 1, {"offload.optimizer=host", "offload.delayed_update=true"}};
  const Layout sharded{"delayed of stage 2", 2, {"offload.optimizer=host", "offload.delayed_update=true", "zero.stage=2"}};
  const auto whole = run_saving(host, {});
  expect_goes_on(host, host, {}, /*bound=*/0, whole);
  expect_goes_on(host, sharded, {}, kLosses, whole);
  run_saving(plain, {});
  const auto begun = run(host, {"checkpoint.resume=" + saved(plain, kSaved).string()});
  ASSERT_EQ(begun.size(), static_cast<size_t>(kLast - kSaved));
  const auto on = run(plain, {"checkpoint.resume=" + saved(plain, kSaved).string()});
  EXPECT_EQ(begun[0].loss, on[0].loss) << "the weights that were saved";
  EXPECT_NE(begun[1].loss, on[1].loss) << "those again";
  try {
    run(plain, {"checkpoint.resume=" + saved(host, kSaved).string()});
    FAIL() << "a last update is missing";
  } catch (const std::exception& error) {
    EXPECT_THAT(error.what(), AllOf(HasSubstr("offload.delayed_update = false"), HasSubstr("set offload.delayed_update = true")));
  }
}

/// Frozen weights have no update that could be late: what was loaded stays. They are trained ones here, for initial ones would not tell.
TEST_F(Resume, ADelayedUpdateLeavesFrozenWeightsAsTheyWereSaved) {
  const Layout base{"base", 1, {}};
  run_saving(base, {});
  const auto learned = saved(base, kSaved).string();
  for (const Layout& host : {Layout{"one", 1, {}}, Layout{"two", 2, {"zero.stage=2"}}}) {
    SCOPED_TRACE(host.name);
    Sets sets{"lora.modules=layers.*.attention.*", "offload.optimizer=host", "offload.delayed_update=true", "checkpoint.every=1", "run.steps=7"};
    const auto go_on = [&](const std::string& from, const std::string& into, const Sets& more = {}) {
      Sets all = sets;
      all.insert(all.end(), more.begin(), more.end());
      all.insert(all.end(), {"checkpoint.resume=" + from, "checkpoint.dir=" + (folder_ / into).string()});
      return run(host, all);
    };
    const auto whole = go_on(learned, "whole", {"checkpoint.partial=[\"**.lora_*\"]"}), again = go_on((folder_ / "whole" / step_name(5)).string(), "again");
    ASSERT_EQ(again.size(), 2);
    for (size_t i = 0; i < 2; ++i) EXPECT_EQ(again[i].loss, whole[i + 2].loss) << again[i].step;
    expect_same_bits(stored(folder_ / "again" / step_name(7)), stored(folder_ / "whole" / step_name(7)));
    for (const char* used : {"whole", "again"}) std::filesystem::remove_all(folder_ / used);
  }
}

/// The newest weights are those of the copies that are one update ahead; those of the model stay what they were.
TEST_F(Resume, ADelayedUpdateGoesOnInWeightsOfAnotherType) {
  const Layout host{"delayed", 1, {"offload.optimizer=host", "offload.delayed_update=true"}};
  const std::map<std::string, Sets> types{{"fp32", {}},
                                          {"bf16 with masters", {"precision.params=bf16"}},
                                          {"bf16 alone", {"precision.params=bf16", "precision.master=bf16", "precision.reduce=bf16"}}};
  for (const auto& [before, was] : types) {
    std::filesystem::remove_all(saved(host));
    run_saving(host, was);
    const auto state = stored(saved(host, kSaved));
    for (const auto& [after, is] : types) {
      if (before == after) continue;
      SCOPED_TRACE(before + " to " + after);
      for (const auto& [name, tensor] : loaded(host, is, saved(host, kSaved))) {
        const std::string parameter(checkpoint::parameter_of(name)), kind(checkpoint::state_of(name));
        const bool newest = kind == "master" || kind == optim::kNextState, has_master = state.contains("optimizer.master." + parameter);
        const at::Tensor want = state.at(!newest ? name : (has_master ? "optimizer.master." : "optimizer.next.") + parameter);
        EXPECT_TRUE(at::equal(tensor, want.to(tensor.scalar_type()))) << name;
      }
    }
  }
}

TEST_F(Resume, EveryLayoutGoesOnInEveryOther) {
  const std::vector<Layout> all(layouts().begin(), layouts().begin() + 5);
  expect_each_goes_on(all, {0, 1, 2, 3, 4});
}

TEST_F(Resume, LayersThatAreCutGoOnCutInAnotherWayOrWhole) {
  const std::vector<Layout> cut{{"tp4", 4, {"mesh.tp=4"}},
                                {"ddp2", 2, {}},
                                {"tp2 of stage 3 over 2", 4, {"mesh.tp=2", "mesh.dp_shard=2", "zero.stage=3", "tensor.sequence_parallel=true"}},
                                {"one alone", 1, {}}};
  expect_each_goes_on(cut, {0, 1, 2});
}

TEST_F(Resume, ExpertsGoOnOverOtherRanksOrWhole) {
  const Sets mixture{"model.family=mixtral", "model.experts=4", "model.experts_per_token=2", "model.router=sigmoid", "moe.bias_rate=0.01"};
  const std::vector<Layout> dealt{{"ep2", 2, {"mesh.ep=2", "zero.stage=1"}},
                                  {"one device", 1, {}},
                                  {"ep4 of stage 3", 4, {"mesh.ep=4", "zero.stage=3"}},
                                  {"ep2 in a fixed order", 4, {"mesh.ep=2", "run.deterministic=true"}},
                                  {"ep2 of stage 2 over 4", 4, {"mesh.ep=2", "zero.stage=2"}},
                                  {"ep2 of stage 3 in two stages", 4, {"mesh.ep=2", "mesh.pp=2", "mesh.dp_shard=2", "zero.stage=3"}}};
  expect_each_goes_on(dealt, {0, 1, 3}, mixture);
}

TEST_F(Resume, ExpertsGoOnCutByTheirWidthAndOverTheRanksOfLayers) {
  const Sets mixture{"model.family=mixtral", "model.experts=4", "model.experts_per_token=2", "model.shared_ffn_dim=24"};
  const std::vector<Layout> dealt{{"tp2 ep2", 2, {"mesh.tp=2", "mesh.ep=2"}},
                                  {"tp2 ep2 wide of stage 3", 4, {"mesh.tp=2", "mesh.ep=2", "mesh.expert_tp=2", "zero.stage=3"}},
                                  {"one for itself", 1, {}},
                                  {"ep1 wide of stage 1", 2, {"mesh.expert_tp=2", "zero.stage=1"}},
                                  {"tp4", 4, {"mesh.tp=4", "tensor.sequence_parallel=true", "mesh.ep=2"}}};
  expect_each_goes_on(dealt, {0, 1, 3}, mixture);
}

/// State that is not laid out as its parameter: sums of rows, scales of blocks; in parts where a rank holds nothing of some matrix.
class ResumeOptimizer : public Resume, public ::testing::WithParamInterface<const char*> {};
INSTANTIATE_TEST_SUITE_P(Kinds, ResumeOptimizer, ::testing::Values("adam8bit", "adafactor", "lion", "muon"));

TEST_P(ResumeOptimizer, GoesOnInOtherLayouts) {
  const std::vector<Layout> layouts{{"stage 1 of 3", 3, {"zero.stage=1"}},
                                    {"one for itself", 1, {}},
                                    {"tp2", 2, {"mesh.tp=2"}},
                                    {"stage 3 of 5", 5, {"zero.stage=3"}},
                                    {"pp2 of stage 2", 4, {"mesh.pp=2", "zero.stage=2"}}};
  Sets sets{"model.dim=64", "model.ffn_dim=80", "batch.global_size=10", "batch.micro_size=1", std::string("optim.name=") + GetParam()};
  if (std::string(GetParam()) == "adafactor") sets.insert(sets.end(), {"optim.momentum=0.5", "model.tie_embeddings=false"});
  expect_each_goes_on(layouts, {0, 3}, sets);
}

TEST_F(Resume, StagesGoOnInAnotherPipelineOrWhole) {
  const std::vector<Layout> cut{
      {"pp2", 2, {"mesh.pp=2"}},
      {"one by itself", 1, {}},
      {"pp2 in chunks", 2, {"mesh.pp=2", "pipeline.schedule=interleaved", "pipeline.virtual_stages=2"}},
      {"pp4", 4, {"mesh.pp=4", "pipeline.schedule=zb_h1"}},
      {"pp2 in a V of stage 3 over 2", 4, {"mesh.pp=2", "pipeline.schedule=zb_v", "pipeline.virtual_stages=2", "mesh.dp_shard=2", "zero.stage=3"}},
      {"pp2 x tp2 of stage 3 over 2", 8, {"mesh.pp=2", "mesh.tp=2", "mesh.dp_shard=2", "zero.stage=3"}}};
  expect_each_goes_on(cut, {0, 1, 2});
}

/// One run that moves from layout to layout, each leg from the checkpoint of the last, beside one device that never moved.
/// A ring adds in an order that depends on an element's place in the message. Beside parts of other sizes what two tensor-parallel ranks hold alike would have
/// another place on each, and drift apart; a checkpoint keeps one of them.
TEST_F(Resume, WhatRanksWithPartsOfOtherSizesHoldAlikeStaysAlike) {
  const Sets uneven{"mesh.tp=2",           "mesh.order=[\"tp\", \"dp_shard\", \"dp_replicate\", \"cp\", \"pp\"]",
                    "model.ffn_dim=11",    "model.vocab_size=267",
                    "batch.global_size=8", "comm.algorithm=all_reduce=ring,reduce_scatter=ring",
                    "optim.name=sgd",      "optim.lr=0.05"};
  for (const Layout& layout : {Layout{"replicas", 8, {"zero.bucket_bytes=1000"}}, Layout{"zero1", 8, {"zero.stage=1", "zero.bucket_bytes=1000"}},
                               Layout{"zero3", 8, {"zero.stage=3"}}}) {
    for (const Sets& family : {Sets{"model.family=mlp", "model.kv_heads=4"}, Sets{"model.family=gpt2", "model.kv_heads=4"}}) {
      SCOPED_TRACE(family.front());
      Sets sets = uneven;
      sets.insert(sets.end(), family.begin(), family.end());
      expect_goes_on(layout, layout, sets, 0, run_saving(layout, sets));
      std::filesystem::remove_all(saved(layout));
    }
  }
}

TEST_F(Resume, ARunMovesFromTensorParallelToDataParallelToBothToOneDevice) {
  const Layout together{"tp2 x dp_shard2", 4, {"mesh.tp=2", "mesh.dp_shard=2", "zero.stage=3", "tensor.sequence_parallel=true"}};
  const std::vector<Layout> legs{{"tp4", 4, {"mesh.tp=4"}}, {"dp2", 2, {}}, together, {"one", 1, {}}};
  constexpr int64_t kLeg = 4;  // steps
  const auto last_step = [&](size_t leg) { return kLeg * static_cast<int64_t>(leg + 1); };
  for (const Sets& model : {Sets{"model.family=gpt2", "model.kv_heads=4", "model.tie_embeddings=true"}, Sets{"model.tie_embeddings=false"}}) {
    SCOPED_TRACE(model.front());
    const auto with = [&](Sets sets, size_t leg) {
      sets.insert(sets.begin(), model.begin(), model.end());
      sets.push_back("run.steps=" + std::to_string(last_step(leg)));
      return sets;
    };
    const auto unmoved = run(legs.back(), with({}, legs.size() - 1));
    const Layout moving{"moving", 0, {}};
    std::filesystem::remove_all(saved(moving));
    for (size_t leg = 0; leg < legs.size(); ++leg) {
      SCOPED_TRACE(legs[leg].name);
      Sets sets{"checkpoint.dir=" + saved(moving).string()};
      const auto before = saved(moving, last_step(leg) - kLeg);
      if (leg > 0) {  // weights and Adam's state arrive to the bit
        const auto state = stored(before);
        EXPECT_TRUE(std::ranges::any_of(state, [](const auto& entry) { return entry.first.starts_with("optimizer."); }));
        expect_same_bits(loaded(legs[leg], with({}, leg), before), state);
        sets.push_back("checkpoint.resume=" + before.string());
      }
      const auto steps = run(legs[leg], with(sets, leg));
      ASSERT_EQ(steps.size(), kLeg);
      for (const StepResult& step : steps) {
        const StepResult& want = unmoved[static_cast<size_t>(step.step - 1)];
        EXPECT_NEAR(step.loss, want.loss, kLosses * want.loss) << step.step;
        EXPECT_NEAR(step.grad_norm, want.grad_norm, 2e-5 * want.grad_norm) << step.step;
      }
    }
  }
}

/// Masters and the loss scale travel, too. Across layouts a 16-bit weight may be rounded the other way, so after the first loss the bound is that of its type.
TEST_F(Resume, SixteenBitsWithMastersGoOn) {
  for (const std::string type : {"bf16", "fp16"}) {
    Sets sets{"precision.params=" + type, "precision.compute=" + type};
    if (type == "fp16") sets.insert(sets.end(), {"precision.loss_scale=dynamic", "precision.growth_steps=2"});
    const double bound = replay_bound({type});
    for (const auto& [from, targets] : std::vector<std::pair<size_t, std::vector<size_t>>>{{3, {3, 2}}, {5, {5, 1}}}) {
      const Layout& source = layouts()[from];
      std::filesystem::remove_all(saved(source));
      const auto whole = run_saving(source, sets);
      const auto state = stored(saved(source, kSaved));
      EXPECT_TRUE(state.contains("optimizer.master.norm.weight"));
      for (const size_t to : targets) {
        expect_same_bits(loaded(layouts()[to], sets, saved(source, kSaved)), state);
        expect_goes_on(source, layouts()[to], sets, bound, whole);
      }
    }
  }
}

/// The type of the weights may change: fp32 weights become the masters of 16-bit ones and come back from them.
TEST_F(Resume, WeightsOfAnotherTypeGoOn) {
  const std::map<std::string, Sets> types{
      {"fp32", {}},
      {"bf16 with masters", {"precision.params=bf16", "precision.compute=bf16"}},
      {"fp16 with masters", {"precision.params=fp16", "precision.compute=fp16", "precision.loss_scale=dynamic"}},
      {"bf16 alone", {"precision.params=bf16", "precision.compute=bf16", "precision.master=bf16", "precision.reduce=bf16"}}};
  const Layout& source = layouts()[2];
  for (const auto& [before, was] : types) {
    std::filesystem::remove_all(saved(source));
    const auto whole = run_saving(source, was);
    const auto from = saved(source, kSaved);
    const auto state = stored(from);
    const auto trained = [&](const std::string& parameter) {  // the weight as the optimizer knew it
      const auto master = state.find("optimizer.master." + parameter);
      return master == state.end() ? state.at("model." + parameter) : master->second;
    };
    for (const auto& [after, is] : types) {
      if (before == after) continue;
      SCOPED_TRACE(before + " to " + after);
      const Layout& target = layouts()[after == "fp32" ? 3 : 1];
      for (const auto& [name, tensor] : loaded(target, is, from)) {
        const size_t model = std::string("model.").size(), master = std::string("optimizer.master.").size();
        const at::Tensor want = name.starts_with("optimizer.master.") ? trained(name.substr(master))
                                : name.starts_with("model.")          ? trained(name.substr(model))
                                                                      : state.at(name);
        EXPECT_TRUE(at::equal(tensor, want.to(tensor.scalar_type()))) << name;
      }
      auto all = is;
      all.push_back("checkpoint.resume=" + from.string());
      const auto steps = run(target, all);
      ASSERT_EQ(steps.size(), kLast - kSaved);
      for (size_t i = 0; i < steps.size(); ++i) EXPECT_NEAR(steps[i].loss, whole[kSaved + i].loss, replay_bound({"bf16"}) * whole[kSaved + i].loss);
    }
  }
}

/// Masters begin as the weights that were saved are, and not as they are rounded, wherever they wait and whether there is other state of their weights.
TEST_F(Resume, MastersOfSavedWeightsAreTheSameWhereverTheyWait) {
  const std::string dir = "offload.dir=" + (folder_ / "away").string();
  const std::vector<Layout> places{{"device", 1, {}},
                                   {"host", 1, {"offload.optimizer=host"}},
                                   {"host, updated on the device", 1, {"offload.optimizer=host", "offload.update=device"}},
                                   {"disk", 1, {"offload.optimizer=disk", dir}}};
  const std::vector<std::pair<Sets, Sets>> cases{
      {{"optim.name=sgd"}, {"optim.name=sgd"}},
      {{"lora.modules=layers.*.attention.*"}, {"lora.modules=layers.*.attention.*", "lora.trained=[\"norm.weight\"]"}}};
  for (const auto& [before, after] : cases) {
    std::filesystem::remove_all(saved(places[0]));
    run_saving(places[0], before);
    const auto from = saved(places[0], kSaved);
    const auto state = stored(from);
    Sets narrow = after;
    narrow.insert(narrow.end(), {"precision.params=bf16", "precision.compute=bf16"});
    std::vector<StepResult> on_device;
    for (const Layout& place : places) {
      SCOPED_TRACE(::testing::PrintToString(after) + " on " + place.name);
      const auto held = loaded(place, narrow, from);
      EXPECT_TRUE(at::equal(held.at("optimizer.master.norm.weight"), state.at("model.norm.weight")));
      auto sets = narrow;
      sets.push_back("checkpoint.resume=" + from.string());
      const auto steps = run(place, sets);
      if (on_device.empty()) on_device = steps;
      ASSERT_EQ(steps.size(), kLast - kSaved);
      for (size_t i = 0; i < steps.size(); ++i) EXPECT_EQ(steps[i].loss, on_device[i].loss) << i;
    }
  }
}

/// Resident but for what the rank keeps: nothing. The mapped file is the kernel's cache.
TEST_F(Resume, NoRankHoldsTheWholeModelWhileItLoads) {
  const auto& source = layouts()[1];
  run_saving(source, {});
  const auto state = stored(saved(source, kSaved));
  int64_t whole = 0;
  for (const auto& [name, tensor] : state) whole += static_cast<int64_t>(tensor.nbytes());
  const auto& target = layouts()[3];
  const Config config = settings(target, {"checkpoint.resume=" + saved(source, kSaved).string()});
  comm::run_ranks(target.ranks, [&](comm::World& ranks) {
    const Mesh mesh(ranks, mesh_shape(config.mesh, config.zero.stage, ranks.size()));
    RankScope scope(config, ranks.local_size());
    scope.memory().reset_peak();
    const Stepper stepper(config, mesh, testing_support::test_device(), scope, open_inputs(config).resume);
    EXPECT_GT(scope.memory().peak(), whole * 0.75 / target.ranks);
    EXPECT_LT(scope.memory().peak(), whole * 1.25 / target.ranks) << "of " << whole << " on " << target.ranks << " ranks";
  });
}

TEST_F(Resume, ARankReadsTheBytesThatItHoldsAndNoMore) {
  for (const size_t index : {2, 3, 4}) {
    const Layout& layout = layouts()[index];
    run_saving(layout, {});
    const auto from = saved(layout, kSaved);
    const auto manifest = checkpoint::read_manifest(from);
    const Config config = settings(layout, {});
    comm::run_ranks(layout.ranks, [&](comm::World& ranks) {
      const Mesh mesh(ranks, mesh_shape(config.mesh, config.zero.stage, ranks.size()));
      RankScope scope(config, ranks.local_size());
      const Stepper stepper(config, mesh, testing_support::test_device(), scope);
      const auto held = checkpoint::training_tensors(*stepper.run().model, stepper.run().optimizer.get());
      uint64_t bytes = 0;
      for (const auto& each : held) bytes += each.tensor.nbytes();
      EXPECT_EQ(checkpoint::load(from, manifest, held).read_bytes, bytes) << layout.name << ", rank " << ranks.rank();
    });
  }
}

/// Ranks that read other bytes from the same name: hosts whose disks differ.
TEST_F(Resume, ReplicasThatAreNotEqualOnceLoadedAreNamed) {
  run_saving(layouts()[0], {});
  const auto good = saved(layouts()[0], kSaved), other = folder_ / "other";
  std::filesystem::copy(good, other);
  const auto file = other / "rank-00000-of-00001.safetensors";
  const auto entry = checkpoint::SafetensorsFile(file).entry("model.norm.weight");
  std::fstream(file, std::ios::in | std::ios::out | std::ios::binary).seekp(static_cast<std::streamoff>(entry.offset + entry.bytes - 3)).put('\x01');
  for (const auto& layout : {layouts()[1], layouts()[2], layouts()[4], layouts()[5]}) {
    const auto load = [&] {
      comm::run_ranks(layout.ranks, [&](comm::World& ranks) {
        const bool last = ranks.rank() == ranks.size() - 1;
        const Config config = settings(layout, {"checkpoint.verify=false", "checkpoint.resume=" + (last ? other : good).string()});
        const Mesh mesh(ranks, mesh_shape(config.mesh, config.zero.stage, ranks.size()));
        RankScope scope(config, ranks.local_size());
        const Stepper stepper(config, mesh, testing_support::test_device(), scope, open_inputs(config).resume);
      });
    };
    EXPECT_THAT(load, ::testing::ThrowsMessage<ConfigError>(AllOf(HasSubstr("the replicas differ"), HasSubstr("'norm.weight'")))) << layout.name;
  }
}

/// Three ranks under a launcher that is not ours: nobody has hashed for them.
class SharedHashes : public Resume {
 protected:
  struct Seen {
    int64_t step = 0;
    std::vector<std::string> remarks;
  };
  std::vector<Seen> check(const Config& config, int ranks) const {
    std::vector<Seen> seen(static_cast<size_t>(ranks));
    comm::run_ranks(ranks, [&](comm::World& world) {
      Inputs inputs = open_inputs(config, {.one_of_several = true});
      check_hashes(inputs, config, world);
      if (inputs.resume) EXPECT_EQ(inputs.resume->hashed, config.checkpoint.verify);
      seen[static_cast<size_t>(world.rank())] = {inputs.resume ? inputs.resume->manifest.step : 0, inputs.remarks};
    });
    return seen;
  }

  void damage(int64_t step) const {
    for (const auto& entry : std::filesystem::directory_iterator(saved(layouts()[0], step))) {
      if (entry.path().extension() != ".safetensors") continue;
      std::fstream file(entry.path(), std::ios::in | std::ios::out | std::ios::binary);
      file.seekp(-5, std::ios::end);
      file.put('\x55');
    }
  }
};

TEST_F(SharedHashes, CheckpointsOfDifferentRunsAreRefusedOnAllRanks) {
  run_saving(layouts()[0], {"run.steps=3"});
  run_saving(layouts()[1], {"run.steps=3"});
  comm::run_ranks(3, [&](comm::World& world) {
    const Config config = settings(layouts()[0], {"checkpoint.resume=" + saved(layouts()[world.rank() == 1 ? 1 : 0], 3).string()});
    Inputs inputs = open_inputs(config, {.one_of_several = true});
    EXPECT_THAT([&] { check_hashes(inputs, config, world); },
                ::testing::ThrowsMessage<ConfigError>(AllOf(HasSubstr("rank 1"), HasSubstr("go on from step 3 of different runs"))))
        << world.rank();
  });
}

/// A disk, or a network, may fail for a moment: what lies behind it would be set aside, and its steps trained again.
TEST_F(SharedHashes, WhatCannotBeReadIsNotTakenForDamaged) {
  run_saving(layouts()[0], {"run.steps=6"});
  const auto latest = settings(layouts()[0], {"checkpoint.dir=" + saved(layouts()[0]).string(), "checkpoint.resume=latest", "run.steps=6"});
  const auto hide = [](const std::filesystem::path& file) {  // a link to itself, which nobody can open
    std::filesystem::rename(file, file.string() + ".kept");
    std::filesystem::create_symlink(file.filename(), file);
    return Attachment([file] { std::filesystem::rename(file.string() + ".kept", file); });
  };
  const auto refused = ::testing::ThrowsMessage<ConfigError>(
      AllOf(HasSubstr("checkpoint.resume = latest: "), HasSubstr("step-00000006"), HasSubstr("symbolic links"), HasSubstr("it may be whole")));
  std::vector<std::filesystem::path> files{saved(layouts()[0], 6) / "manifest.json"};
  for (const auto& entry : std::filesystem::directory_iterator(saved(layouts()[0], 6))) {
    if (entry.path().extension() == ".safetensors") files.push_back(entry.path());
  }
  ASSERT_GT(files.size(), 1);
  for (const auto& file : files) {
    const Attachment hidden = hide(file);
    EXPECT_THAT([&] { open_inputs(latest); }, refused) << file;
    EXPECT_THAT([&] { open_inputs(latest, {.restarted = true}); }, ::testing::Not(::testing::Throws<ConfigError>())) << "the launcher tries again";
    EXPECT_THAT([&] { open_inputs(latest, {.restarted = true}); }, ::testing::ThrowsMessage<Error>(HasSubstr("it may be whole")));
    EXPECT_THAT([&] { open_inputs(settings(layouts()[0], {"checkpoint.resume=" + saved(layouts()[0], 6).string(), "run.steps=6"})); },
                ::testing::ThrowsMessage<ConfigError>(AllOf(HasSubstr("step-00000006"), HasSubstr("symbolic links"))));
    const auto named =
        settings(layouts()[0], {"checkpoint.resume=" + saved(layouts()[0], 6).string(), "checkpoint.dir=" + (folder_ / "other").string(), "run.steps=6"});
    if (file != files.front()) EXPECT_THAT([&] { open_inputs(named, {.restarted = true}); }, ::testing::Not(::testing::Throws<ConfigError>()));
    EXPECT_THROW(checkpoint::find_latest(saved(layouts()[0])), ConfigError);
    EXPECT_NO_THROW(checkpoint::prune(saved(layouts()[0]), 5)) << "it counts for none";
  }
  EXPECT_EQ(open_inputs(latest).resume->manifest.step, 6);
  // Between the look at sizes and the one at bytes.
  comm::run_ranks(3, [&](comm::World& world) {
    Inputs inputs = open_inputs(latest, {.one_of_several = true});
    comm::barrier(world.group());
    std::optional<Attachment> hidden;
    if (world.rank() == 0) hidden = hide(files[1]);
    comm::barrier(world.group());
    EXPECT_THAT([&] { check_hashes(inputs, latest, world); }, ::testing::ThrowsMessage<Error>(AllOf(HasSubstr("rank "), HasSubstr("symbolic links"))));
    comm::barrier(world.group());
  });
}

TEST_F(SharedHashes, TheOlderOneIsTakenByAllAndSaidAloud) {
  run_saving(layouts()[0], {"run.steps=6"});
  const auto latest = settings(layouts()[0], {"checkpoint.dir=" + saved(layouts()[0]).string(), "checkpoint.resume=latest", "run.steps=6"});
  for (const int ranks : {1, 2, 3, 5}) {
    for (const auto& seen : check(latest, ranks)) {
      EXPECT_EQ(seen.step, 6);
      EXPECT_TRUE(seen.remarks.empty());
    }
  }
  damage(6);
  for (const int ranks : {1, 2, 3, 5}) {
    for (const auto& seen : check(latest, ranks)) {
      EXPECT_EQ(seen.step, 3);
      EXPECT_THAT(seen.remarks, ::testing::ElementsAre(AllOf(HasSubstr("passing over "), HasSubstr("step-00000006"), HasSubstr("is damaged"))));
    }
  }
  damage(3);
  for (const auto& seen : check(latest, 3)) {
    EXPECT_EQ(seen.step, 0);
    ASSERT_FALSE(seen.remarks.empty());
    EXPECT_THAT(seen.remarks.back(), AllOf(HasSubstr("none of the 2 checkpoints in "), HasSubstr(" can be used: starting afresh")));
  }
  EXPECT_THAT([&] { check(settings(layouts()[0], {"checkpoint.resume=" + saved(layouts()[0], 6).string(), "run.steps=6"}), 3); },
              ::testing::ThrowsMessage<ConfigError>(AllOf(HasSubstr("checkpoint.resume = "), HasSubstr("is damaged"), HasSubstr("name another checkpoint"))));
  const auto trusting = settings(layouts()[0], {"checkpoint.resume=" + saved(layouts()[0], 6).string(), "checkpoint.verify=false", "run.steps=6"});
  for (const auto& seen : check(trusting, 2)) EXPECT_EQ(seen.step, 6);
}

}  // namespace
}  // namespace tessera
