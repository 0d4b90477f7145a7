// Weights of 16 bits, and gradients that are rounding alone: no false alarm.

#include <cmath>

#include <c10/core/GradMode.h>
#include <gmock/gmock.h>

#include "tests/verify/fixture.h"

namespace tessera {
namespace {

using Narrow = testing_support::VerifyFixture;

VerifyOptions gradient_of_wv_times(double factor) {
  VerifyOptions options;
  options.plant.gradients = [factor](Composition& run, int) {
    for (const auto& parameter : run.updated) {
      const c10::NoGradGuard no_grad;
      if (parameter.name == "layers.1.attention.wv.weight") at::Tensor(parameter.tensor).mutable_grad().mul_(factor);
    }
  };
  return options;
}

/// Autograd adds the uses of one weight up in the weight's type, two stages with a copy each in the gradients'.
TEST_F(Narrow, TheUsesOfATiedWeightAreAddedUpInTheGradientsFormat) {
  const std::vector<std::string> tied{"precision.params=bf16", "model.tie_embeddings=true", "run.threads=1"};
  const auto with = [&](std::vector<std::string> more) {
    more.insert(more.end(), tied.begin(), tied.end());
    return more;
  };
  expect_passes("pp=2", "llama", with({}));
  expect_passes("pp=2", "gpt2", with({"run.deterministic=true"}));
  expect_passes("pp=2,dp_shard=2", "llama", with({"zero.stage=3"}));
  expect_passes("dp_shard=2", "llama", with({"zero.stage=2"}));
}

/// Weights of 16 bits that are computed with in fp32: what ranks add up in another order is not rounded before.
TEST_F(Narrow, WeightsThatAreComputedWithInFp32) {
  const auto with = [](std::vector<std::string> more) {
    more.insert(more.end(), {"precision.params=bf16", "precision.compute=fp32", "run.threads=1", "batch.global_size=6", "batch.micro_size=1"});
    return more;
  };
  expect_passes("tp=2", "llama", with({"model.tie_embeddings=true"}));
  expect_passes("tp=3,dp_shard=2", "llama", with({"zero.stage=3", "model.heads=6", "tensor.sequence_parallel=true", "recompute.mode=full"}));
  expect_passes("tp=2,dp_shard=2", "gpt2", with({"zero.stage=2", "tensor.sequence_parallel=true", "tensor.overlap=true"}));
  expect_passes("tp=2,pp=2", "gpt2", with({"pipeline.schedule=zb_h1"}));
  expect_passes("tp=2", "mlp", with({"run.deterministic=true"}));
  for (const char* kernels : {"run.kernels=auto", "run.kernels=reference"}) {
    expect_passes("tp=2", "llama",
                  {"precision.params=fp16", "precision.loss_scale=8192", "run.threads=1", "batch.global_size=4", "batch.micro_size=1", kernels});
  }
}

/// fp16 has no number below 6e-8: what crosses in it without a loss scale loses entries of any tensor that are smaller.
TEST_F(Narrow, GradientsThatFp16LosesOnTheNetwork) {
  const std::vector<std::string> sets{"precision.reduce=fp16", "run.threads=1", "batch.global_size=6", "batch.micro_size=1"};
  const auto with = [&](std::vector<std::string> more) {
    more.insert(more.end(), sets.begin(), sets.end());
    return more;
  };
  expect_passes("dp_replicate=2", "llama", with({}));
  expect_passes("dp_replicate=2,dp_shard=3", "gpt2", with({"zero.stage=2", "precision.loss_scale=256"}));
  expect_passes("dp_shard=3", "llama", with({"zero.stage=3"}));
  expect_passes("dp_replicate=2,dp_shard=3", "gpt2", with({"zero.stage=1", "model.layers=5", "data.seq_len=64"}));
}

/// A loss scale that is too large for both sides: there are no gradients to compare, and none of their norms.
TEST_F(Narrow, AStepThatBothSidesSkip) {
  for (const char* mesh : {"dp_replicate=2", "tp=2"}) {
    const std::vector<std::string> sets{"precision.params=fp16", "precision.compute=fp16", "precision.loss_scale=dynamic", "run.threads=1",
                                        "data.seq_len=1",        "batch.global_size=2",    "batch.micro_size=1",           "model.tie_embeddings=true"};
    const auto report = run(mesh, "llama", sets, {.steps = 3});
    EXPECT_GT(report.skipped, 0) << to_string(report);
    EXPECT_LT(report.skipped, 3) << to_string(report);
    EXPECT_TRUE(report.passed()) << to_string(report);
    EXPECT_FALSE(report.backward.first) << to_string(report);
  }
}

/// What overflows lies in some rank's slices alone: the others' are finite, and skip the step as well.
TEST_F(Narrow, AStepThatOverflowsInSlicesOfOneRank) {
  for (const auto& [mesh, more] : {std::pair{"dp_shard=2", "zero.stage=3"}, {"tp=2", "zero.stage=0"}, {"pp=2", "zero.stage=0"}}) {
    const std::vector<std::string> sets{"precision.compute=fp16", "run.threads=1", "batch.global_size=4", more};
    for (const char* scale : {"262144", "524288", "1048576", "2097152", "4194304", "16777216"}) {
      auto all = sets;
      all.push_back(std::string("precision.loss_scale=") + scale);
      const auto report = run(mesh, "llama", all);
      SCOPED_TRACE(std::string(mesh) + " " + scale + "\n" + to_string(report));
      EXPECT_EQ(report.passed(), report.skipped < report.steps) << "no side overflows alone here";
      for (const auto& each : report.gradients.each) EXPECT_TRUE(std::isfinite(each.value));
      if (std::string(scale) == "16777216") EXPECT_THAT(to_string(report), ::testing::HasSubstr("NOT compared: every step was skipped"));
    }
  }
}

/// Tiles of tokens split the products of one rank, which one device has whole.
TEST_F(Narrow, TilesOfTokens) {
  for (const char* format : {"precision.compute=fp32", "precision.compute=bf16", "precision.params=bf16"}) {
    for (const char* fixed : {"run.deterministic=false", "run.deterministic=true"}) {
      expect_passes("dp_replicate=1", "llama", {"recompute.ffn_tile=3", "run.threads=1", "batch.global_size=40", "batch.micro_size=2", format, fixed});
    }
  }
}

/// A query with two keys learns from the difference of two values, a thousandth of each: one device is as far off the exact gradient as the layout.
TEST_F(Narrow, GradientsThatCancelAreMeasuredByWhatIsExact) {
  const std::vector<std::string> sets{
      "model.heads=6",       "model.dim=18",          "model.ffn_dim=24",       "model.vocab_size=257",    "model.layers=8",
      "model.norm_eps=1e-3", "batch.micro_size=3",    "batch.global_size=12",   "data.seq_len=2",          "precision.params=bf16",
      "optim.name=lion",     "precision.master=bf16", "precision.compute=bf16", "optim.decay_on=matrices", "optim.lr=1e-3",
      "run.seed=33",         "run.threads=1"};
  const auto report = run("tp=2", "gpt2", sets);
  EXPECT_TRUE(report.passed()) << to_string(report);
  const auto planted = run("tp=2", "llama", {"precision.compute=bf16", "run.threads=1", "batch.global_size=4"}, gradient_of_wv_times(1.06));
  EXPECT_FALSE(planted.gradients.within());
  EXPECT_EQ(planted.gradients.worst().name, "layers.1.attention.wv.weight") << to_string(planted);
}

/// The same of fp32, whose exact gradient is made in fp64: seed 1815 of RandomLayouts, 1.2e-5 of the scale apart, each side to another side of what is exact.
TEST_F(Narrow, GradientsThatCancelInFp32AreMeasuredInFp64) {
  const std::vector<std::string> sets{"model.heads=1",   "model.dim=3",   "batch.micro_size=1", "data.seq_len=2", "zero.stage=1",
                                      "optim.name=muon", "optim.lr=1e-3", "run.seed=30",        "run.steps=2",    "run.threads=1"};
  const auto report = run("cp=2", "gpt2", sets);
  EXPECT_TRUE(report.passed()) << to_string(report);
  const auto planted = run("tp=2", "llama", {"run.threads=1", "batch.global_size=4"}, gradient_of_wv_times(1 + 2e-5));
  EXPECT_FALSE(planted.gradients.within());
  EXPECT_EQ(planted.gradients.worst().name, "layers.1.attention.wv.weight") << to_string(planted);
}

/// A query with one key: neither has a gradient but for rounding.
TEST_F(Narrow, SequencesOfOneToken) {
  for (const char* format : {"precision.compute=bf16", "precision.compute=fp8"}) {
    const auto report = run("tp=2", "llama", {"data.seq_len=1", "run.threads=1", format});
    EXPECT_TRUE(report.passed()) << to_string(report);
  }
}

}  // namespace
}  // namespace tessera
