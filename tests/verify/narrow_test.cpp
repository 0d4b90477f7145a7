// Weights of 16 bits, and gradients that are rounding alone: no false alarm.

#include "tests/verify/fixture.h"

namespace tessera {
namespace {

using Narrow = testing_support::VerifyFixture;

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
