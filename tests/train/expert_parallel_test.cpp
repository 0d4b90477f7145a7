// Experts dealt over ranks: one device is the oracle.

#include <algorithm>

#include <gmock/gmock.h>

#include "tessera/comm/backends/record.h"
#include "tests/train/mixture_fixture.h"

namespace tessera {
namespace {

using namespace tessera::testing_support;

class ExpertsOverRanks : public MixtureFixture {
 protected:
  void expect_like_one_device(const std::vector<std::string>& model, const std::vector<std::string>& layout, int world) const {
    expect_same_run({"model.experts=8", "run.steps=3"}, model, layout, world);
  }

  /// The bits of one device, with run.deterministic.
  void expect_bits(std::vector<std::string> model, const std::vector<std::string>& layout, int world) const {
    SCOPED_TRACE(::testing::PrintToString(model) + " " + ::testing::PrintToString(layout) + " on " + std::to_string(world));
    model.insert(model.begin(), {"model.experts=8", "run.deterministic=true", "optim.max_grad_norm=0.1"});
    const Trace want = train(config("mixtral", model), 1);
    model.insert(model.end(), layout.begin(), layout.end());
    const Trace got = train(config("mixtral", model), world);
    for (const auto& [name, gradient] : want.gradients) EXPECT_TRUE(at::equal(got.gradients.at(name), gradient)) << name;
    for (const auto& [name, weight] : want.weights) EXPECT_TRUE(at::equal(got.weights.at(name), weight)) << name;
    for (size_t i = 0; i < want.steps.size(); ++i) {
      EXPECT_EQ(got.steps[i].loss, want.steps[i].loss);
      EXPECT_EQ(got.steps[i].grad_norm, want.steps[i].grad_norm);
    }
  }
};

TEST_F(ExpertsOverRanks, GiveTheRunOfOne) {
  for (const char* stage : {"zero.stage=1", "zero.stage=2", "zero.stage=3"}) {
    expect_like_one_device({}, {stage, "mesh.ep=2"}, 2);                         // each rank has its experts alone
    expect_like_one_device({}, {stage, "mesh.ep=2"}, 4);                         // two ranks share those of each half
    expect_like_one_device({}, {stage, "mesh.ep=2", "mesh.dp_replicate=2"}, 4);  // and two replicas
  }
  expect_like_one_device({"model.experts=6"}, {"zero.stage=3", "mesh.ep=3"}, 3);
  expect_like_one_device({"model.experts=5"}, {"zero.stage=2", "mesh.ep=5"}, 5);
  expect_like_one_device({"batch.micro_size=1"}, {"zero.stage=3", "mesh.ep=8"}, 8);
  expect_like_one_device({"batch.micro_size=1"}, {"zero.stage=3", "mesh.ep=4", "zero.wrap=layers.*.*"}, 8);
}

/// Buffers are the module's, and not of the experts' set and of the rest's.
TEST_F(ExpertsOverRanks, TakeBuffersFromRankZeroOnce) {
  const auto recorder = std::make_shared<comm::Recorder>();
  decorators_ = {[&](std::shared_ptr<comm::Engine> inner, const comm::GroupInfo& group) {
    return group.world_rank(group.rank) == 0 ? comm::make_record_engine(recorder, group, std::move(inner)) : inner;
  }};
  for (const char* stage : {"zero.stage=1", "zero.stage=2"}) {
    recorder->clear();
    train(config("mixtral", {"model.experts=4", "model.router=sigmoid", "mesh.ep=2", "run.steps=2", stage}), 4);
    const auto of_ranks = [&](int ranks) {
      return std::ranges::count_if(recorder->records(), [&](const auto& record) { return record.site == "zero.buffers" && record.group_size == ranks; });
    };
    EXPECT_GT(of_ranks(4), 0) << stage;
    EXPECT_EQ(of_ranks(2), 0) << stage << ": the ranks that share experts";
  }
}

TEST_F(ExpertsOverRanks, InStagesGiveTheRunOfOne) {
  expect_like_one_device({}, {"mesh.pp=2", "mesh.dp_shard=2", "mesh.ep=2", "zero.stage=1"}, 4);
  expect_like_one_device({}, {"mesh.pp=2", "mesh.dp_shard=2", "mesh.ep=2", "zero.stage=3", "pipeline.schedule=zb_h1"}, 4);
  expect_like_one_device({}, {"mesh.pp=2", "mesh.dp_shard=2", "mesh.ep=2", "zero.stage=3", "pipeline.split=[\"1\",\"3\"]"}, 4);  // a stage without a mixture
}

TEST_F(ExpertsOverRanks, KeepEveryRouterSharedExpertsAndCapacity) {
  const std::vector<std::string> layout{"zero.stage=3", "mesh.ep=2"};
  expect_like_one_device({"model.router=sigmoid", "moe.bias_rate=0.01"}, layout, 4);
  expect_like_one_device({"model.router=expert_choice"}, layout, 2);
  expect_like_one_device({"model.norm_topk=false", "model.shared_ffn_dim=24", "model.shared_gate=true"}, layout, 2);
  expect_like_one_device({"moe.capacity_factor=1"}, layout, 2);
  expect_like_one_device({"zero.accumulate=sharded"}, {"zero.stage=2", "mesh.ep=2"}, 4);
}

/// Columns of a sequence lie on several ranks, and so do the tokens of which a balance term is.
TEST_F(ExpertsOverRanks, WithCutSequencesGiveTheRunOfOne) {
  const std::vector<std::string> terms{"moe.balance_loss=10", "moe.z_loss=1", "data.seq_len=15", "optim.name=sgd",
                                       "optim.lr=1e-2"};  // AdamW makes a step of a rounding
  expect_like_one_device(terms, {"mesh.cp=2"}, 2);
  expect_like_one_device(terms, {"mesh.cp=3", "zero.stage=3", "recompute.mode=full"}, 3);
  expect_like_one_device(terms, {"mesh.cp=2", "mesh.ep=2", "zero.stage=1"}, 2);
  expect_like_one_device(terms, {"mesh.cp=2", "mesh.dp_shard=2", "mesh.ep=4", "zero.stage=3", "context.method=ulysses"}, 4);
  expect_like_one_device(terms, {"mesh.cp=2", "mesh.dp_shard=2", "mesh.pp=2", "mesh.ep=2", "zero.stage=3", "recompute.mode=full"}, 8);
  expect_like_one_device({"model.router=sigmoid", "moe.bias_rate=0.01"}, {"mesh.cp=2", "mesh.dp_replicate=2", "mesh.ep=2", "zero.stage=2"}, 4);
}

/// One tree over micro-batches for what all data ranks have, and for experts that lie on several of them: the bits of one device, for any number of either.
TEST_F(ExpertsOverRanks, GiveTheBitsOfOneInAFixedOrder) {
  expect_bits({}, {"mesh.ep=2"}, 2);
  expect_bits({}, {"mesh.ep=2"}, 4);
  expect_bits({"batch.micro_size=1"}, {"mesh.ep=2"}, 6);
  expect_bits({"batch.micro_size=1", "model.router=sigmoid", "moe.bias_rate=0.01"}, {"mesh.ep=8"}, 8);
  expect_bits({"model.experts=6", "model.shared_ffn_dim=24"}, {"mesh.ep=3", "recompute.mode=full"}, 3);
  expect_bits({"precision.compute=bf16"}, {"mesh.ep=4"}, 4);
  expect_bits({"lora.modules=layers.*.attention.*"}, {"mesh.ep=2"}, 2);  // experts are frozen
  expect_bits({"optim.groups=[\"**.experts: name = lion, lr = 0.001\", \"layers.*: name = muon\"]"}, {"mesh.ep=2"}, 2);
  expect_bits({"optim.name=adafactor", "optim.groups=[\"**.experts: name = sgd, lr = 0.001\"]"},
              {"mesh.ep=2", "offload.optimizer=disk", "offload.dir=" + (folder_ / "away").string()}, 2);
}

/// Rows then have no gradient, and the products are to say whose rows they multiply all the same.
TEST_F(ExpertsOverRanks, GiveTheBitsOfOneWhereNothingBeforeThemLearns) {
  expect_bits({"lora.modules=layers.1.attention.*", "lora.trained=[\"layers.0.feed_forward.experts.*\"]"}, {"mesh.ep=2"}, 2);
  expect_bits({"lora.modules=layers.1.attention.*", "lora.trained=[\"layers.*.feed_forward.experts.w1\"]"}, {"mesh.ep=4"}, 4);
  expect_bits({"lora.modules=layers.*.feed_forward.shared.*", "lora.trained=[\"**.experts.*\"]", "model.shared_ffn_dim=12", "recompute.mode=full"},
              {"mesh.ep=2"}, 2);
}

/// Where each expert is cut over ranks, too, and where there are stages, these are part of the arithmetic, and the number of other data ranks is not.
TEST_F(ExpertsOverRanks, GiveTheSameBitsForAnyNumberOfDataRanks) {
  for (const auto& layout : {std::vector<std::string>{"mesh.expert_tp=2"}, {"mesh.pp=2", "mesh.ep=2"}, {"mesh.pp=2", "mesh.ep=2", "pipeline.schedule=zb_h1"}}) {
    SCOPED_TRACE(::testing::PrintToString(layout));
    std::vector<std::string> sets{"model.experts=8", "run.deterministic=true"};
    sets.insert(sets.end(), layout.begin(), layout.end());
    const int stages = layout.front() == "mesh.pp=2" ? 2 : 1;
    const auto with = [&](const char* ranks) {
      auto all = sets;
      all.emplace_back(ranks);
      return config("mixtral", all);
    };
    const Trace two = train(with("mesh.dp_replicate=2"), 2 * stages), four = train(with("mesh.dp_replicate=4"), 4 * stages);
    for (const auto& [name, weight] : two.weights) EXPECT_TRUE(at::equal(four.weights.at(name), weight)) << name;
    for (size_t i = 0; i < two.steps.size(); ++i) EXPECT_EQ(four.steps[i].loss, two.steps[i].loss);
    const Trace one = train(config("mixtral", {"model.experts=8", "run.deterministic=true"}), 1);
    EXPECT_LE(difference(two.gradients, one.gradients), kGradients);
  }
}

TEST_F(ExpertsOverRanks, RecomputeByTheFirstRouting) {
  for (const auto& sets : {std::vector<std::string>{"recompute.mode=full"},
                           {"recompute.mode=full", "recompute.modules=layers.*.feed_forward"},
                           {"recompute.mode=selective", "recompute.keep=[\"mm\"]"}}) {
    auto plain = std::vector<std::string>{"model.experts=8", "zero.stage=3", "mesh.ep=2", "run.steps=3"};
    const Trace want = train(config("mixtral", plain), 4);
    plain.insert(plain.end(), sets.begin(), sets.end());
    const Trace got = train(config("mixtral", plain), 4);
    for (const auto& [name, gradient] : want.gradients) EXPECT_TRUE(at::equal(got.gradients.at(name), gradient)) << name;
    for (size_t i = 0; i < want.steps.size(); ++i) EXPECT_EQ(got.steps[i].loss, want.steps[i].loss);
  }
}

}  // namespace
}  // namespace tessera
