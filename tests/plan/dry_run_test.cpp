#include "tessera/plan/dry_run.h"

#include "tessera/core/error.h"
#include "tessera/models/flops.h"
#include "tessera/plan/presets.h"
#include "tests/train/fixture.h"

namespace tessera {
namespace {

class DryRunTest : public testing::TrainFixture {
 protected:
  void expect_real_peak(const Config& config, int world) {
    const auto real = train(config, world).peak;
    const auto planned = plan::dry_run(config, world);
    MemoryByCategory most{};
    int64_t largest = -1;
    for (const auto& ranks : planned.ranks) {
      int64_t total = 0;
      for (int64_t bytes : ranks.peak_bytes) total += bytes;
      if (total > largest) largest = total, most = ranks.peak_bytes;
    }
    if (world == 1) {
      for (int c = 0; c < num_memory_categories; ++c) EXPECT_EQ(most[c], real[c]) << to_string(static_cast<MemoryCategory>(c));
      return;
    }
    // Gloo's worker may hold on to a collective's scratch for a moment after it is done, so a real run of several ranks has a few bytes of play.
    int64_t total = 0;
    for (int64_t bytes : real) total += bytes;
    EXPECT_NEAR(static_cast<double>(largest), static_cast<double>(total), 0.001 * static_cast<double>(total)) << world << " ranks";
  }
};

TEST_F(DryRunTest, PeakEqualsTheRealRunToTheByte) {
  for (int world : {1, 2}) {
    expect_real_peak(config("llama", {"model.kv_heads=2"}), world);
    expect_real_peak(config("gpt2", {"model.dropout=0.1", "optim.name=sgd"}), world);
    expect_real_peak(config("mlp"), world);
    expect_real_peak(config("llama", {"precision.compute=bf16"}), world);
    expect_real_peak(config("llama", {"run.deterministic=true"}), world);
  }
}

TEST_F(DryRunTest, CollectivesOfAStepAreTheGradientsAndOneReport) {
  const auto run = plan::dry_run(config("llama"), 7);
  ASSERT_EQ(run.ranks.size(), 1);
  EXPECT_EQ(run.ranks[0].count, 7);
  int64_t reduced = 0;
  for (const auto& c : run.ranks[0].collectives) {
    if (c.op == "all_reduce") reduced += c.bytes;
    EXPECT_TRUE(c.op == "all_reduce" || c.op == "all_gather") << c.op;
  }
  EXPECT_EQ(reduced, 4 * run.parameters);
}

TEST_F(DryRunTest, UnequalRunsArePaddedSoOneClassOfShapesRemains) {
  const auto run = plan::dry_run(config("llama"), 5);  // 7 micro-batches: two ranks hold two, three hold one and one of weight 0
  int64_t ranks = 0;
  for (const auto& c : run.ranks) {
    ranks += c.count;
    EXPECT_EQ(c.micro_batches, 2);
  }
  EXPECT_EQ(ranks, 5);
}

TEST_F(DryRunTest, LargeWorldsAreQuick) {
  const auto run = plan::dry_run(config("llama", {"batch.global_size=8192", "batch.micro_size=2"}), 4096);
  EXPECT_EQ(run.ranks.at(0).count, 4096);
}

TEST(Presets, HaveThePublishedNumberOfParameters) {
  const std::map<std::string, double> published{{"7b", 6.74e9},           {"llama3-8b", 8.03e9},           {"llama3-70b", 70.6e9},
                                                {"llama3-405b", 405.9e9}, {"mistral-large-123b", 122.6e9}, {"gpt3-175b", 174.6e9},
                                                {"nemotron4-340b", 341e9}};
  for (const auto& name : plan::preset_names()) {
    auto config = plan::preset(name, {});
    ASSERT_TRUE(config);
    resolve(*config);
    EXPECT_NEAR(static_cast<double>(num_parameters(config->model)), published.at(name), 0.01 * published.at(name)) << name;
  }
  EXPECT_FALSE(plan::preset("9b", {}));
}

}  // namespace
}  // namespace tessera
