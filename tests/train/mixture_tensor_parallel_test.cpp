// Mixtures whose other layers are cut over mesh.tp, and experts that are dealt over these ranks, too: one device is the oracle.

#include <cmath>

#include <gmock/gmock.h>

#include "tessera/models/flops.h"
#include "tests/train/mixture_fixture.h"

namespace tessera {
namespace {

using namespace tessera::testing_support;
using Sets = std::vector<std::string>;

constexpr const char* kBySequence = "tensor.sequence_parallel=true";

class CutMixtures : public MixtureFixture {
 protected:
  /// Under SGD, for AdamW makes a step of a rounding, and with large terms of the router, which are of all tokens wherever they are.
  void expect_like_one_device(const Sets& model, const Sets& layout, int world) const {
    Sets base{"model.experts=8", "moe.balance_loss=1", "moe.z_loss=0.1", "optim.name=sgd", "optim.lr=0.02", "run.steps=2", "batch.global_size=10"};
    expect_same_run(base, model, layout, world);
  }
  void expect_with_and_without_sequences(const Sets& model, Sets layout, int world) const {
    expect_like_one_device(model, layout, world);
    layout.emplace_back(kBySequence);
    expect_like_one_device(model, layout, world);
  }
};

TEST_F(CutMixtures, GiveTheRunOfOneWhereNothingIsSharded) {
  expect_with_and_without_sequences({"data.seq_len=15"}, {"mesh.tp=2"}, 2);  // every rank has all experts, and computes some of the rows
  expect_with_and_without_sequences({"model.experts=5"}, {"mesh.tp=3"}, 3);
  expect_with_and_without_sequences({}, {"mesh.tp=2", "mesh.ep=2"}, 2);
  expect_with_and_without_sequences({"data.seq_len=15"}, {"mesh.tp=2", "mesh.expert_tp=2"}, 2);
  expect_with_and_without_sequences({}, {"mesh.tp=4", "mesh.ep=2"}, 4);  // two ranks have terms of the same experts
  expect_with_and_without_sequences({}, {"mesh.tp=4", "mesh.ep=2", "mesh.expert_tp=2"}, 4);
  expect_like_one_device({}, {"mesh.tp=4", "mesh.expert_tp=2", kBySequence, "mesh.dp_replicate=2", "tensor.overlap=true"}, 8);
}

TEST_F(CutMixtures, GiveTheRunOfOneInEveryStage) {
  for (const char* stage : {"zero.stage=1", "zero.stage=2", "zero.stage=3"}) {
    expect_with_and_without_sequences({}, {stage, "mesh.tp=2", "mesh.dp_shard=2", "mesh.ep=2"}, 4);
    expect_like_one_device({}, {stage, "mesh.tp=2", "mesh.dp_shard=2", "mesh.ep=2", "mesh.expert_tp=2"}, 4);
    expect_like_one_device({}, {stage, "mesh.dp_shard=2", "mesh.expert_tp=2"}, 2);  // without mesh.tp: ranks that share experts have other samples
  }
  expect_with_and_without_sequences({"model.experts=5", "data.seq_len=15"}, {"zero.stage=3", "mesh.tp=3", "mesh.dp_shard=1"}, 3);
  expect_with_and_without_sequences({"model.experts=5"}, {"zero.stage=2", "mesh.tp=2", "mesh.dp_shard=3"}, 6);
  expect_like_one_device({}, {"zero.stage=1", "mesh.tp=2", "mesh.dp_shard=2", "mesh.dp_replicate=2", "mesh.ep=4", kBySequence}, 8);
  expect_like_one_device({}, {"zero.stage=3", "mesh.dp_shard=4", "mesh.ep=2", "mesh.expert_tp=2", "zero.wrap=layers.*.*"}, 4);
}

TEST_F(CutMixtures, GiveTheRunOfOneInStagesAndWithCutSequences) {
  expect_like_one_device({}, {"mesh.tp=2", "mesh.pp=2", "mesh.ep=2"}, 4);
  expect_like_one_device({}, {"mesh.tp=2", "mesh.pp=2", "mesh.dp_shard=2", "mesh.ep=2", "mesh.expert_tp=2", "zero.stage=3", kBySequence}, 8);
  expect_like_one_device({}, {"mesh.tp=2", "mesh.pp=2", "mesh.dp_shard=2", "mesh.ep=4", "zero.stage=1", "pipeline.schedule=zb_h1"}, 8);
  expect_with_and_without_sequences({"data.seq_len=15"}, {"mesh.tp=2", "mesh.cp=2", "mesh.ep=4", "zero.stage=2"}, 4);
  expect_with_and_without_sequences({"data.seq_len=17"}, {"mesh.tp=2", "mesh.cp=2", "mesh.expert_tp=2"}, 4);
  expect_like_one_device({}, {"mesh.tp=2", "mesh.cp=2", "mesh.dp_shard=2", "mesh.ep=2", "mesh.expert_tp=4", "zero.stage=3", "recompute.mode=full"}, 8);
}

TEST_F(CutMixtures, KeepEveryRouterSharedExpertsAndCapacity) {
  const Sets layout{"mesh.tp=2", "mesh.ep=2"}, sharded{"mesh.tp=2", "mesh.dp_shard=2", "mesh.ep=2", "mesh.expert_tp=2", "zero.stage=3"};
  const Sets shared{"model.norm_topk=false", "model.shared_ffn_dim=24", "model.shared_gate=true"};
  for (const Sets& cut : {layout, sharded}) {
    const int world = cut.size() == layout.size() ? 2 : 4;
    expect_with_and_without_sequences({"model.router=sigmoid", "moe.bias_rate=0.01"}, cut, world);
    expect_with_and_without_sequences(shared, cut, world);
    expect_like_one_device({"model.router=expert_choice"}, cut, world);
    expect_like_one_device({"moe.capacity_factor=1"}, cut, world);
  }
}

/// What the ranks hold of each parameter is counted once, however experts and layers are dealt: gradients of ones have the square root of their number as norm.
TEST_F(CutMixtures, CountEachElementOnce) {
  struct Case {
    int world;
    Sets sets;
  };
  const std::vector<Case> cases{{2, {"mesh.tp=2"}},
                                {4, {"mesh.tp=4", "mesh.ep=2"}},
                                {4, {"mesh.tp=4", "mesh.ep=2", "mesh.expert_tp=2", kBySequence}},
                                {4, {"mesh.tp=2", "mesh.cp=2", "mesh.expert_tp=2"}},
                                {4, {"mesh.tp=2", "mesh.dp_shard=2", "zero.stage=1"}},
                                {8, {"mesh.tp=2", "mesh.dp_shard=4", "mesh.ep=2", "mesh.expert_tp=2", "zero.stage=2"}},
                                {8, {"mesh.tp=2", "mesh.dp_shard=2", "mesh.pp=2", "mesh.ep=4", "zero.stage=3", kBySequence}},
                                {8, {"mesh.tp=2", "mesh.dp_shard=2", "mesh.dp_replicate=2", "mesh.ep=2", "zero.stage=3"}}};
  for (const Case& one : cases) {
    SCOPED_TRACE(::testing::PrintToString(one.sets));
    Sets sets{"model.experts=8", "run.steps=1", "model.shared_ffn_dim=24", "model.shared_gate=true"};
    sets.insert(sets.end(), one.sets.begin(), one.sets.end());
    const Config settings = config("mixtral", sets);
    const auto ones = [](Composition& run) {
      for (const auto& parameter : run.updated) parameter.tensor.mutable_grad().fill_(1);
    };
    const Trace trace = train(settings, one.world, ones);
    const double expected = std::sqrt(static_cast<double>(num_parameters(settings.model)));
    EXPECT_NEAR(trace.steps.at(0).grad_norm, expected, 1e-6 * expected);
  }
}

TEST_F(CutMixtures, RecomputeByTheFirstRouting) {
  for (const Sets& layout : {Sets{"mesh.tp=2", "mesh.ep=2"}, {"mesh.tp=2", "mesh.dp_shard=2", "mesh.expert_tp=2", "zero.stage=3", kBySequence}}) {
    Sets sets{"model.experts=8", "model.shared_ffn_dim=24", "run.steps=2"};
    sets.insert(sets.end(), layout.begin(), layout.end());
    const int world = layout.size() == 2 ? 2 : 4;
    const Trace want = train(config("mixtral", sets), world);
    for (const auto& again : {Sets{"recompute.mode=full"},
                              {"recompute.mode=full", "recompute.modules=layers.*.feed_forward"},
                              {"recompute.mode=full", "recompute.modules=layers.*.feed_forward.experts"},
                              {"recompute.mode=selective", "recompute.keep=[\"mm\"]"}}) {
      Sets with = sets;
      with.insert(with.end(), again.begin(), again.end());
      const Trace got = train(config("mixtral", with), world);
      for (const auto& [name, gradient] : want.gradients) EXPECT_TRUE(at::equal(got.gradients.at(name), gradient)) << name << ::testing::PrintToString(again);
      for (size_t i = 0; i < want.steps.size(); ++i) EXPECT_EQ(got.steps[i].loss, want.steps[i].loss);
    }
  }
}

/// The tree over micro-batches is of the data ranks; those that experts are dealt over have the same micro-batches.
TEST_F(CutMixtures, AreDeterministicOverDataRanks) {
  for (const Sets& layout : {Sets{"mesh.tp=2", "mesh.ep=2"}, {"mesh.tp=4", "mesh.ep=2", kBySequence}, {"mesh.tp=2", "mesh.expert_tp=2"}}) {
    Sets sets{"model.experts=8", "run.deterministic=true", "run.steps=2"};
    sets.insert(sets.end(), layout.begin(), layout.end());
    const int cut = layout.front() == "mesh.tp=4" ? 4 : 2;
    const Trace want = train(config("mixtral", sets), cut);
    const Trace got = train(config("mixtral", sets), 2 * cut);
    for (const auto& [name, weight] : want.weights) EXPECT_TRUE(at::equal(got.weights.at(name), weight)) << name;
    for (size_t i = 0; i < want.steps.size(); ++i) EXPECT_EQ(got.steps[i].loss, want.steps[i].loss);
  }
}

}  // namespace
}  // namespace tessera
