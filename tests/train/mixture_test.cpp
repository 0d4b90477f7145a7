// Mixtures of experts in every layout that this build composes: one device is the oracle.

#include <algorithm>
#include <cmath>

#include <gmock/gmock.h>

#include "tessera/data/sequential_loader.h"
#include "tests/test_device.h"
#include "tests/train/mixture_fixture.h"

namespace tessera {
namespace {

using namespace tessera::testing_support;
using ::testing::HasSubstr;

class MixtureTraining : public MixtureFixture {
 protected:
  /// SGD moves weights as rounding does; Adam's first steps make full steps of what is near zero, and a token near a tie would go elsewhere.
  void expect_like_one_device(const std::vector<std::string>& model, const std::vector<std::string>& layout, int world) const {
    expect_same_run({"optim.name=sgd", "optim.lr=0.3", "run.steps=4"}, model, layout, world);
  }
};

TEST_F(MixtureTraining, DataParallelRanksGiveTheRunOfOne) {
  for (const int world : {2, 3, 5}) expect_like_one_device({}, {}, world);
}

TEST_F(MixtureTraining, ShardedRanksGiveTheRunOfOne) {
  for (const char* stage : {"zero.stage=1", "zero.stage=2", "zero.stage=3"}) expect_like_one_device({}, {stage}, 3);
  expect_like_one_device({}, {"zero.stage=3"}, 7);  // more ranks than experts
  expect_like_one_device({}, {"zero.stage=3", "zero.wrap=layers.*.*"}, 2);
}

TEST_F(MixtureTraining, StagesGiveTheRunOfOne) {
  expect_like_one_device({}, {"mesh.pp=2"}, 2);
  expect_like_one_device({}, {"mesh.pp=2", "pipeline.split=[\"1\",\"3\"]"}, 2);  // a stage without a mixture
  expect_like_one_device({}, {"mesh.pp=2", "zero.stage=3", "pipeline.schedule=gpipe"}, 4);
  expect_like_one_device({}, {"mesh.pp=2", "pipeline.schedule=zb_h1"}, 2);
}

TEST_F(MixtureTraining, EveryRouterGivesTheRunOfOne) {
  expect_like_one_device({"model.router=sigmoid", "moe.bias_rate=0.01"}, {"zero.stage=2"}, 2);
  expect_like_one_device({"model.router=sigmoid", "moe.bias_rate=0.01"}, {"mesh.pp=2"}, 4);
  expect_like_one_device({"model.router=sigmoid", "moe.bias_rate=0.01"}, {"mesh.pp=2", "pipeline.split=[\"1\",\"3\"]"}, 2);  // a stage without a mixture
  expect_like_one_device({"model.router=expert_choice"}, {}, 2);
  expect_like_one_device({"model.norm_topk=false", "model.shared_ffn_dim=24", "model.shared_gate=true"}, {"zero.stage=3"}, 2);
  expect_like_one_device({"moe.capacity_factor=1"}, {}, 3);
}

TEST_F(MixtureTraining, RecomputationKeepsBitsAndCountsLoadOnce) {
  for (const auto& router : {"softmax", "sigmoid", "expert_choice"}) {
    const std::string set = std::string("model.router=") + router;
    const Trace want = train(config("mixtral", {set}), 1);
    for (const auto& sets : {std::vector<std::string>{"recompute.mode=full"},
                             {"recompute.mode=full", "recompute.modules=layers.*.feed_forward"},
                             {"recompute.mode=selective", "recompute.keep=[\"mm\"]"}}) {
      auto all = sets;
      all.push_back(set);
      const Trace got = train(config("mixtral", all), 1);
      for (const auto& [name, gradient] : want.gradients) EXPECT_TRUE(at::equal(got.gradients.at(name), gradient)) << name << " " << router;
      for (size_t i = 0; i < want.steps.size(); ++i) {
        EXPECT_EQ(got.steps[i].loss, want.steps[i].loss);
        EXPECT_EQ(got.steps[i].experts[1].share, want.steps[i].experts[1].share);
      }
    }
  }
}

TEST_F(MixtureTraining, DeterministicRunsHaveTheSameBitsOnAnyNumberOfRanks) {
  const Trace want = train(config("mixtral", {"run.deterministic=true"}), 1);
  for (const int world : {2, 3}) {
    const Trace got = train(config("mixtral", {"run.deterministic=true"}), world);
    for (const auto& [name, weight] : want.weights) EXPECT_TRUE(at::equal(got.weights.at(name), weight)) << name;
    for (size_t i = 0; i < want.steps.size(); ++i) EXPECT_EQ(got.steps[i].loss, want.steps[i].loss);
  }
}

TEST_F(MixtureTraining, TermsDoNotDependOnHowMicroBatchesAreDealt) {
  // The gradient of the router's terms alone: large weights, and a router that the loss hardly sees.
  const std::vector<std::string> terms{"moe.balance_loss=100", "moe.z_loss=100", "run.steps=2", "optim.max_grad_norm=0"};
  const Trace want = train(config("mixtral", terms), 1);
  for (const auto& [world, layout] : {std::pair{2, "mesh.dp_replicate=2"}, {3, "mesh.dp_replicate=3"}, {2, "mesh.pp=2"}}) {
    auto sets = terms;
    sets.push_back(layout);
    const Trace got = train(config("mixtral", sets), world);
    EXPECT_LE(difference(got.gradients, want.gradients), kGradients) << layout;
  }
}

/// Each line is a window: of sixteen columns as it is, and of more with padding behind it.
TEST_F(MixtureTraining, OfPaddedWindowsIsThatOfTheSameDocumentsInShorterOnes) {
  for (const auto& sets : {std::vector<std::string>{"recompute.mode=full", "model.shared_ffn_dim=16"},
                           {"model.router=sigmoid", "moe.bias_rate=0.01"},
                           {"model.router=expert_choice"},
                           {"moe.capacity_factor=1"},
                           {"model.router=sigmoid", "moe.capacity_factor=0.75", "recompute.mode=full"}}) {
    SCOPED_TRACE(::testing::PrintToString(sets));
    const auto of = [&](const char* seq_len) {
      std::vector<std::string> all{write_even_lines(), "data.documents=lines", seq_len, "run.steps=4", "optim.name=sgd", "optim.lr=0.3"};
      all.insert(all.end(), sets.begin(), sets.end());
      return train(config("mixtral", all), 1);
    };
    expect_same_trace(of("data.seq_len=27"), of("data.seq_len=16"));
  }
}

TEST_F(MixtureTraining, PaddingIsLeftOutAlikeInEveryLayout) {
  struct Layout {
    int ranks;
    std::vector<std::string> model, sets;
  };
  const char* const by_sequence = "tensor.sequence_parallel=true";
  for (const auto& [ranks, model, sets] :
       std::vector<Layout>{{3, {"moe.capacity_factor=1"}, {"recompute.mode=full"}},
                           {2, {"model.router=expert_choice"}, {"zero.stage=3"}},
                           {2, {"model.router=sigmoid", "moe.bias_rate=0.01"}, {"zero.stage=1", "mesh.ep=2"}},
                           {2, {"model.router=sigmoid", "moe.bias_rate=0.01"}, {"mesh.cp=2"}},
                           {4, {}, {"zero.stage=3", "mesh.cp=2", "mesh.ep=4", "recompute.mode=full"}},
                           {2, {"moe.capacity_factor=1"}, {"mesh.tp=2", "mesh.ep=2"}},
                           {2, {"model.router=sigmoid", "moe.bias_rate=0.01"}, {"mesh.tp=2", by_sequence, "recompute.mode=full"}},
                           {4, {}, {"mesh.tp=2", "mesh.cp=2", "mesh.ep=4", "zero.stage=1", by_sequence}},
                           // The last of these ranks has padding alone.
                           {4,
                            {"model.router=sigmoid", "moe.bias_rate=0.01", "batch.micro_size=1", "data.seq_len=44"},
                            {"mesh.tp=2", "mesh.cp=2", "context.balance=contiguous", "mesh.ep=4", "zero.stage=1", by_sequence}},
                           {2, {"moe.capacity_factor=1"}, {"mesh.pp=2"}},
                           {3, {"model.layers=4", "model.router=expert_choice"}, {"mesh.pp=3", "pipeline.schedule=zb_h1"}},
                           {4, {}, {"mesh.pp=2", "mesh.cp=2", "zero.stage=1", "mesh.ep=2", "recompute.mode=full"}}}) {
    // Of short lines several begin alike: tokens that are one and the same to an expert, among which rounding would choose.
    const auto has = [](const std::vector<std::string>& list, const char* set) { return std::ranges::find(list, set) != list.end(); };
    const bool even = has(model, "model.router=expert_choice") || has(sets, "context.balance=contiguous");
    std::vector<std::string> base{even ? write_even_lines() : write_lines(),
                                  "data.documents=lines",
                                  "data.seq_len=29",
                                  "batch.global_size=6",
                                  "model.experts=4",
                                  "run.steps=3",
                                  "optim.name=sgd",
                                  "optim.lr=0.3"};
    expect_same_run(base, model, sets, ranks);
  }
}

/// The last micro-batch of an evaluation has rows beside its windows; experts that choose do not choose those.
TEST_F(MixtureTraining, AnEvaluationSeesTheTextAlone) {
  const Config run = config("mixtral", {"model.router=expert_choice"});
  const auto text = corpus(run);
  for (const int stages : {1, 2}) {
    comm::run_ranks(stages, [&](comm::World& world) {
      Config settings = run;
      settings.mesh.pp = stages;
      const Mesh mesh(world, mesh_shape(settings.mesh, settings.zero.stage, stages));
      RankScope scope(settings, world.local_size());
      Stepper stepper(settings, mesh, at::kCPU, scope);
      ForwardEngine& engine = stepper.forward_only();
      const int64_t windows = text->windows(16), left = 3;
      data::SequentialLoader loader(text, 16, windows - left, 0, 1, engine.reads());
      loader.next();
      const data::MicroBatch padded = *loader.next();
      data::MicroBatch alone = padded;
      ASSERT_EQ(padded.padding_size(), (windows - 2 * left) * 16);
      alone.padding = at::Tensor();
      alone.rows = left;
      for (at::Tensor* tensor : {&alone.tokens, &alone.labels}) {
        if (tensor->defined()) *tensor = tensor->narrow(0, 0, left);
      }
      const at::Tensor one = engine.loss_sums({alone}), other = engine.loss_sums({padded});
      EXPECT_LE((one - other).abs().max().item<double>(), kLosses * one.abs().max().item<double>());
    });
  }
}

TEST_F(MixtureTraining, CountsEveryChoiceOnceAndWhatACapacityDrops) {
  const Trace trace = train(config("mixtral", {"moe.capacity_factor=1", "run.steps=1"}), 2);
  const ExpertLoad& load = trace.steps[0].experts[0];
  double shares = 0;
  for (const double share : load.share) shares += share;
  EXPECT_NEAR(shares, 1, 1e-12);
  EXPECT_GT(load.dropped, 0);
  EXPECT_LT(load.dropped, 0.5);
  EXPECT_GE(load.busiest(), 1);
  EXPECT_EQ(train(config("mixtral", {"run.steps=1"}), 1).steps[0].experts[0].dropped, 0);
}

TEST_F(MixtureTraining, LoadsAreThoseOfOneStep) {
  constexpr double kChoices = 14 * 16 * 2;  // of a step: what was counted in several has smaller shares
  for (const StepOutcome& step : train(config("mixtral", {"run.steps=4"}), 2).steps) {
    for (const ExpertLoad& load : step.experts) {
      for (const double share : load.share) EXPECT_NEAR(share * kChoices, std::round(share * kChoices), 1e-9);
    }
  }
}

TEST_F(MixtureTraining, TheBiasFollowsTheLoadAlikeOnAllRanks) {
  const auto after_steps = [&](const std::vector<std::string>& more) {
    std::vector<std::string> sets{"model.router=sigmoid", "moe.bias_rate=0.05", "run.steps=3"};
    sets.insert(sets.end(), more.begin(), more.end());
    const auto run = config("mixtral", sets);
    const auto text = corpus(run);
    std::vector<at::Tensor> biases(2);
    comm::run_ranks(2, [&](comm::World& world) {
      Mesh mesh(world, mesh_shape(run.mesh, run.zero.stage, world.size()));
      RankScope scope(run, world.local_size());
      Stepper stepper(run, mesh, testing_support::test_device(), scope);
      data::Loader loader(text, loader_options(run, mesh));
      for (int step = 0; step < 3; ++step) stepper.step(loader.next());
      biases[static_cast<size_t>(world.rank())] = stepper.run().model->named_buffers()["layers.1.feed_forward.router.bias"].clone();
    });
    EXPECT_TRUE(at::equal(biases[0], biases[1]));
    return biases[0].abs().max().item<float>();
  };
  EXPECT_GT(after_steps({}), 0.04);
  // Adapters are of a model that chooses as it did.
  EXPECT_EQ(after_steps({"lora.modules=layers.*.attention.*"}), 0);
  EXPECT_GT(after_steps({"lora.modules=layers.*.attention.*", "lora.trained=[\"layers.*.feed_forward.router.weight\"]"}), 0.04);
}

}  // namespace
}  // namespace tessera
