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

/// A query with one key: neither has a gradient but for rounding.
TEST_F(Narrow, SequencesOfOneToken) {
  for (const char* format : {"precision.compute=bf16", "precision.compute=fp8"}) {
    const auto report = run("tp=2", "llama", {"data.seq_len=1", "run.threads=1", format});
    EXPECT_TRUE(report.passed()) << to_string(report);
  }
}

}  // namespace
}  // namespace tessera
