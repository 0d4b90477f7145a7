#include <cmath>
#include <limits>
#include <set>

#include <gmock/gmock.h>

#include "tessera/core/error.h"
#include "tessera/nn/attach.h"
#include "tests/test_device.h"
#include "tests/train/fixture.h"

namespace tessera {
namespace {

using ::testing::HasSubstr;
using testing_support::difference;
using testing_support::TrainFixture;

using Sets = std::vector<std::string>;

const Sets kHalf{"precision.params=fp16", "precision.compute=fp16", "precision.loss_scale=dynamic"};
const Sets kBfloat{"precision.params=bf16", "precision.compute=bf16"};

Sets with(Sets base, const Sets& more) {
  base.insert(base.end(), more.begin(), more.end());
  return base;
}

class Precision : public TrainFixture {
 protected:
  double final_loss(const Sets& sets, int world = 1) const {
    const auto trace = train(config("llama", with({"run.steps=10", "batch.global_size=6"}, sets)), world);
    EXPECT_LT(trace.steps.back().loss, 0.8 * trace.steps.front().loss) << ::testing::PrintToString(sets);
    return trace.steps.back().loss;
  }
};

TEST_F(Precision, SixteenBitsEndWithinAPercentOfFp32) {
  const double fp32 = final_loss({});
  const auto expect_near = [&](const Sets& sets, double bound = 0.01, int world = 1) {
    EXPECT_NEAR(final_loss(sets, world), fp32, bound * fp32) << ::testing::PrintToString(sets) << " on " << world;
  };
  expect_near(kHalf);
  expect_near({"precision.compute=fp16", "precision.loss_scale=1024", "precision.reduce=fp16"}, 0.01, 2);
  expect_near(kBfloat);
  expect_near(with(kBfloat, {"precision.reduce=bf16"}), 0.01, 3);
  expect_near({"precision.compute=bf16", "precision.reduce=bf16"}, 0.01, 2);
  expect_near({"precision.compute=bf16", "precision.reduce=bf16", "zero.stage=1"}, 0.01, 2);
  expect_near(with(kHalf, {"precision.reduce=fp16", "zero.stage=2"}), 0.01, 3);
  expect_near(with(kBfloat, {"zero.stage=2", "mesh.dp_replicate=2", "precision.reduce=bf16", "batch.micro_size=1"}), 0.01, 4);
  expect_near(with(kHalf, {"precision.reduce=fp16", "zero.stage=3"}), 0.01, 3);
  expect_near({"precision.compute=bf16", "precision.reduce=bf16", "zero.stage=3"}, 0.01, 2);
  expect_near(with(kBfloat, {"precision.master=bf16"}), 0.03);
  expect_near({"precision.compute=fp8"}, 0.03);
  expect_near({"precision.compute=fp8", "precision.fp8_scales=row"}, 0.03);
}

TEST_F(Precision, Gpt2AndMlpTrainInEveryFormat) {
  for (const std::string family : {"gpt2", "mlp"}) {
    for (const Sets& sets : {kHalf, kBfloat, with(kBfloat, {"precision.master=bf16"}), Sets{"precision.compute=fp8"}, with(kHalf, {"run.kernels=reference"})}) {
      const auto trace = train(config(family, with({"model.dropout=0.1", "run.steps=3", "batch.global_size=2"}, sets)), 1);
      EXPECT_LT(trace.steps.back().loss, trace.steps.front().loss) << family << ::testing::PrintToString(sets);
    }
  }
}

TEST_F(Precision, Tf32OnACpuIsFp32) {
  const Sets few{"run.steps=2", "batch.global_size=2"};
  const auto fp32 = train(config("llama", few), 1), tf32 = train(config("llama", with(few, {"precision.compute=tf32"})), 1);
  EXPECT_EQ(difference(tf32.weights, fp32.weights), 0);
}

TEST_F(Precision, AScaleThatIsAPowerOfTwoChangesNoBit) {
  // fp16 on the network alone: on one rank nothing crosses it, so all is fp32.
  const Sets crossing{"precision.reduce=fp16", "run.steps=3", "batch.global_size=4"};
  const auto plain = train(config("llama", crossing), 1), scaled = train(config("llama", with(crossing, {"precision.loss_scale=4096"})), 1);
  EXPECT_EQ(difference(scaled.weights, plain.weights), 0);
  EXPECT_EQ(difference(scaled.gradients, plain.gradients), 0) << "what is recorded is unscaled";
}

/// Where nobody looks at gradients, it is the update that takes the scale away.
TEST_F(Precision, UnscalingInTheUpdateChangesNoBit) {
  const auto last_weights = [&](const Sets& sets, bool looked_at) {
    const Config settings = config("llama", with({"run.steps=3", "batch.global_size=4", "optim.max_grad_norm=0.5"}, sets));
    Mesh mesh(comm::World::alone(), mesh_shape(settings.mesh, settings.zero.stage, 1));
    RankScope scope(settings, 1);
    Stepper stepper(settings, mesh, testing_support::test_device(), scope);
    data::Loader loader(corpus(settings), loader_options(settings, mesh));
    double norm = 0;
    for (int step = 0; step < 3; ++step) {
      const auto outcome = stepper.step(loader.next(), {.gradients_ready = looked_at ? [] {} : std::function<void()>()});
      norm += outcome.grad_norm;
    }
    std::vector<at::Tensor> all;
    for (const auto& parameter : stepper.run().parameters) all.push_back(parameter.tensor.detach().reshape({-1}));
    return std::pair{at::cat(all), norm};
  };
  for (const Sets& sets : {kHalf, with(kHalf, {"precision.loss_scale=1000"}), Sets{"precision.loss_scale=4096"}}) {
    const auto [with_the_update, norm] = last_weights(sets, false);
    const auto [before_it, same_norm] = last_weights(sets, true);
    EXPECT_TRUE(at::equal(with_the_update, before_it)) << ::testing::PrintToString(sets);
    EXPECT_EQ(norm, same_norm) << ::testing::PrintToString(sets);
  }
}

/// Also where the parameters of one stage would let its optimizer do so, and those of the next would not: they add one norm up.
TEST_F(Precision, StagesOfOtherOptimizersHaveOneDevicesNorm) {
  const auto steps = [&](const Sets& sets, int world) {
    const Config settings = config("llama", with({"precision.compute=fp16", "precision.loss_scale=1024", "run.steps=3", "batch.global_size=6"}, sets));
    std::vector<StepOutcome> outcomes;
    const auto text = corpus(settings);
    comm::run_ranks(world, [&](comm::World& ranks) {
      validate(settings, ranks.size());
      Mesh mesh(ranks, mesh_shape(settings.mesh, settings.zero.stage, ranks.size()));
      RankScope scope(settings, ranks.local_size());
      Stepper stepper(settings, mesh, testing_support::test_device(), scope);
      data::Loader loader(text, loader_options(settings, mesh));
      for (int step = 0; step < 3; ++step) {
        const auto outcome = stepper.step(loader.next());
        if (ranks.rank() == 0) outcomes.push_back(outcome);
      }
    });
    return outcomes;
  };
  const Sets first_alone{"mesh.pp=2", "pipeline.split=[\"1\", \"3\"]"}, three{"mesh.pp=3", "pipeline.split=[\"1\", \"2\", \"1\"]"};
  for (const Sets& sets : {Sets{"optim.name=muon"}, Sets{"optim.name=lion", "optim.lr=1e-3", "optim.groups=[\"embed_tokens: name = adamw\"]"},
                           Sets{"optim.groups=[\"layers.*: name = sgd\"]"}, Sets()}) {
    const auto one = steps(sets, 1);
    for (const auto& [layout, world] : {std::pair{first_alone, 2}, {three, 3}, {with(first_alone, {"zero.stage=1", "mesh.dp_shard=2"}), 4}}) {
      SCOPED_TRACE(::testing::PrintToString(with(sets, layout)));
      const auto many = steps(with(sets, layout), world);
      for (size_t i = 0; i < one.size(); ++i) {
        EXPECT_NEAR(many[i].grad_norm, one[i].grad_norm, (i == 0 ? 2e-5 : 1e-2) * one[i].grad_norm) << i;
        EXPECT_NEAR(many[i].loss, one[i].loss, 1e-3 * one[i].loss) << i;
      }
    }
  }
}

TEST_F(Precision, LayoutsAgree) {
  for (const Sets& sets : {kBfloat, with(kBfloat, {"precision.master=bf16"}), kHalf, Sets{"precision.compute=bf16"}}) {
    const Sets all = with({"run.steps=3", "batch.global_size=6"}, sets);
    const auto one = train(config("llama", all), 1);
    for (const int world : {2, 3}) {
      for (const char* stage : {"zero.stage=0", "zero.stage=1", "zero.stage=2", "zero.stage=3"}) {
        SCOPED_TRACE(::testing::PrintToString(sets) + " on " + std::to_string(world) + ", " + stage);
        const auto many = train(config("llama", with(all, {stage})), world);
        // All add fp32 gradients up; what differs is the order, and a rounding to 16 bits where it tips.
        EXPECT_LE(difference(many.gradients, one.gradients), 0.02);
        for (size_t i = 0; i < one.steps.size(); ++i) EXPECT_NEAR(many.steps[i].loss, one.steps[i].loss, 1e-3 * one.steps[i].loss);
      }
    }
  }
}

/// A sum that leaves fp16 does not leave fp32: neither in the tree nor in what the optimizer takes from it.
TEST_F(Precision, TheTreeHandsSumsOfSixteenBitGradientsOverInFp32) {
  for (const Sets& sets : {kHalf, kBfloat}) {
    const Sets all = with({"run.steps=1", "batch.global_size=4", "batch.micro_size=1"}, sets);
    const auto plain = train(config("llama", all), 1, {}, 1);
    for (const int world : {1, 3}) {
      const auto tree = train(config("llama", with(all, {"run.deterministic=true"})), world, {}, 1);
      EXPECT_LE(difference(tree.gradients, plain.gradients), testing_support::kGradients) << ::testing::PrintToString(sets) << " on " << world;
    }
  }
}

/// Weights that are gathered in the type that their layer computes in are those that it would have rounded itself.
TEST_F(Precision, GatheringInTheTypeOfTheProductsChangesNoBit) {
  for (const char* compute : {"precision.compute=bf16", "precision.compute=fp16"}) {
    const Sets sets{"run.steps=2", "batch.global_size=4", "precision.loss_scale=none", compute};
    // One micro-batch a rank, and two terms a sum: the order of no sum differs.
    const auto whole = train(config("llama", with(sets, {"zero.stage=2"})), 2), sharded = train(config("llama", with(sets, {"zero.stage=3"})), 2);
    EXPECT_EQ(difference(sharded.gradients, whole.gradients), 0) << compute;
    EXPECT_EQ(difference(sharded.weights, whole.weights), 0) << compute;
  }
}

/// Spoils the gradient that flows back through a module, or what it gives, in chosen steps.
class Overflow final : public nn::Interceptor {
 public:
  nn::Values call(nn::Module&, nn::Values inputs, const nn::Next& next) override {
    auto outputs = next(std::move(inputs));
    if (active && forward) outputs.at(0) = outputs.at(0).toTensor() * std::numeric_limits<float>::infinity();
    if (active && !forward)
      outputs.at(0).toTensor().register_hook([](const at::Tensor& gradient) { return gradient * std::numeric_limits<float>::infinity(); });
    return outputs;
  }
  bool active = false;
  bool forward = false;
};

class Overflowing : public Precision {
 protected:
  /// What every rank saw of `steps` steps in which rank `bad` overflows at those of `when`.
  std::vector<std::vector<StepOutcome>> run(const Config& settings, int world, int bad, const std::set<int64_t>& when, int64_t steps,
                                            std::vector<std::vector<at::Tensor>>* weights = nullptr) const {
    std::vector<std::vector<StepOutcome>> seen(world);
    if (weights) weights->resize(world);
    const auto text = corpus(settings);
    comm::run_ranks(world, [&](comm::World& ranks) {
      validate(settings, ranks.size());
      Mesh mesh(ranks, mesh_shape(settings.mesh, settings.zero.stage, ranks.size()));
      RankScope scope(settings, ranks.local_size());
      Stepper stepper(settings, mesh, testing_support::test_device(), scope);
      data::Loader loader(text, loader_options(settings, mesh));
      const auto overflow = std::make_shared<Overflow>();
      overflow->forward = forward_;
      const auto attached = nn::attach(*stepper.run().model, "layers.0.feed_forward", overflow);
      for (int64_t step = 1; step <= steps; ++step) {
        overflow->active = ranks.rank() == bad && when.contains(step);
        seen[ranks.rank()].push_back(stepper.step(loader.next()));
        if (!weights) continue;
        std::vector<at::Tensor> all;  // a rank's slices of them, where they are sharded
        for (const auto& parameter : stepper.run().parameters) all.push_back(parameter.tensor.detach().reshape({-1}));
        (*weights)[ranks.rank()].push_back(at::cat(all));
      }
    });
    return seen;
  }

  bool forward_ = false;  ///< the pass that overflows
};

TEST_F(Overflowing, OnOneRankSkipsTheStepOnAll) {
  for (const auto& [world, stage] : std::vector<std::pair<int, int>>{{1, 0}, {2, 0}, {3, 0}, {3, 1}, {2, 2}, {3, 3}}) {
    SCOPED_TRACE(std::to_string(world) + " ranks, stage " + std::to_string(stage));
    std::vector<std::vector<at::Tensor>> weights;
    const auto settings = config("llama", with(kHalf, {"optim.schedule=linear", "optim.warmup_steps=3", "zero.stage=" + std::to_string(stage)}));
    const auto seen = run(settings, world, world - 1, {2, 4}, 5, &weights);
    const optim::LearningRate schedule(settings.optim, settings.run.steps);
    for (int rank = 0; rank < world; ++rank) {
      EXPECT_EQ(seen[rank][0].loss_scale.value, 65536);
      EXPECT_EQ(seen[rank][1].loss_scale.value, 32768);
      EXPECT_EQ(seen[rank][2].loss_scale.value, 32768);
      EXPECT_EQ(seen[rank][4].loss_scale.value, 16384);
      EXPECT_EQ(seen[rank][4].loss_scale.skipped, 2);
      EXPECT_TRUE(at::equal(weights[rank][0], weights[rank][1])) << "skipped";
      EXPECT_FALSE(at::equal(weights[rank][1], weights[rank][2]));
      EXPECT_TRUE(at::equal(weights[rank][2], weights[rank][3])) << "skipped";
      if (stage < 3) EXPECT_TRUE(at::equal(weights[rank][4], weights[0][4]));
      EXPECT_EQ(seen[rank][1].lr, schedule.at(2));
      EXPECT_EQ(seen[rank][2].lr, schedule.at(2)) << "the schedule waited";
      EXPECT_EQ(seen[rank][4].lr, schedule.at(3));
    }
  }
}

TEST_F(Overflowing, StopsAfterSkipsInARowAndNamesRankAndParameter) {
  const auto settings = config("llama", with(kHalf, {"precision.max_skips=2"}));
  EXPECT_THAT([&] { run(settings, 2, 1, {2, 3, 4}, 4); }, ::testing::ThrowsMessage<std::runtime_error>(AllOf(
                                                              HasSubstr("step 3: the gradient's norm is not finite for 2 steps in a row (precision.max_skips)"),
                                                              HasSubstr("on rank 1 the gradient of 'layers.0.feed_forward."))));
}

TEST_F(Overflowing, ALossThatIsNoNumberInTwoStepsRunningStopsAtAnyScale) {
  forward_ = true;
  const auto stops = [&](const Sets& sets, const std::set<int64_t>& when, const std::string& way_out) {
    EXPECT_THAT([&] { run(config("llama", with(kHalf, sets)), 2, 1, when, 5); },
                ::testing::ThrowsMessage<std::runtime_error>(
                    AllOf(HasSubstr("step " + std::to_string(*when.rbegin()) + ": the gradient's norm is not finite, and neither is the loss"),
                          HasSubstr("for 2 steps in a row: on rank 1 the output of 'layers."), HasSubstr(way_out))))
        << ::testing::PrintToString(sets);
  };
  stops({}, {2, 3}, "start again with a lower optim.lr");
  stops({"precision.loss_scale=128"}, {3, 4}, "start again with a lower optim.lr");
  stops({}, {1, 2}, "no weight has been updated yet");
  // One batch may overflow where the next does not.
  const auto seen = run(config("llama", kHalf), 2, 1, {2, 4}, 5);
  for (const auto& rank : seen) EXPECT_EQ(rank[4].loss_scale.skipped, 2);
  EXPECT_FALSE(std::isfinite(seen[0][1].loss));
}

TEST_F(Overflowing, WithoutScalingStopsBeforeTheUpdate) {
  for (const char* stage : {"zero.stage=0", "zero.stage=1", "zero.stage=2", "zero.stage=3"}) {
    EXPECT_THAT(
        [&] { run(config("llama", {stage}), 3, 2, {2}, 4); },
        ::testing::ThrowsMessage<std::runtime_error>(AllOf(
            HasSubstr("step 2: the gradient's norm is not finite: on rank 2 the gradient of 'layers.0.feed_forward."), HasSubstr("the step was not applied"))))
        << stage;
  }
}

TEST_F(Overflowing, TheAdviceIsOfWhatCanBeDone) {
  const auto refused = [&](const std::vector<std::string>& sets, int64_t at) {
    try {
      run(config("mlp", sets), 1, 0, {at}, 4);
    } catch (const std::runtime_error& error) {
      return std::string(error.what());
    }
    return std::string("(went on)");
  };
  EXPECT_THAT(refused({}, 1), HasSubstr("no weight has been updated yet: look at those it began with"));
  EXPECT_THAT(refused({"loss.z_loss=0.5"}, 1), HasSubstr("start again with a smaller loss.z_loss (it is 0.5)"));
  EXPECT_THAT(refused({}, 2), HasSubstr("start again with a lower optim.lr"));
  EXPECT_THAT(refused({"checkpoint.dir=" + (folder_ / "c").string(), "checkpoint.every=1"}, 2),
              HasSubstr("resume from the last checkpoint with a lower optim.lr"));
}

/// Where ranks hold slices, comm.compression is another name of precision.reduce.
TEST_F(Precision, CompressionToSixteenBitsIsReductionInThemWhereStateIsSharded) {
  for (const int stage : {1, 2, 3}) {
    for (const std::string format : {"bf16", "fp16"}) {
      const Sets sharded{"run.steps=3", "zero.stage=" + std::to_string(stage)};
      const auto reduced = train(config("llama", with(sharded, {"precision.reduce=" + format})), 2);
      const auto compressed = train(config("llama", with(sharded, {"comm.compression=" + format})), 2);
      EXPECT_EQ(difference(compressed.weights, reduced.weights), 0) << format << " " << stage;
      EXPECT_GT(difference(compressed.weights, train(config("llama", sharded), 2).weights), 0) << "something was rounded";
    }
  }
}

TEST_F(Precision, ALossThatIsNotFiniteIsNamedWithItsModule) {
  const auto plant = [](Composition& run) {
    const at::NoGradGuard no_grad;
    for (auto& p : run.parameters) {
      if (p.name == "layers.1.ffn_norm.weight") p.tensor.fill_(std::numeric_limits<float>::quiet_NaN());
    }
  };
  EXPECT_THAT([&] { train(config("llama"), 2, plant); },
              ::testing::ThrowsMessage<std::runtime_error>(
                  HasSubstr("step 2: the gradient's norm is not finite: on rank 0 the output of 'layers.1.ffn_norm' is the first")));
}

}  // namespace
}  // namespace tessera
