#include "tessera/plan/whole_run.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tessera/core/error.h"
#include "tessera/plan/preflight.h"
#include "tests/refusal.h"
#include "tests/train/fixture.h"

namespace tessera::plan {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::StartsWith;
using testing_support::refusal;

TEST(WholeRun, IsStepsTimesAStep) {
  DryRun step{.world = 1024, .tokens_per_step = 4'000'000};
  EXPECT_EQ(steps_for(step, 15e12), 3'750'000);
  EXPECT_EQ(steps_for(step, 4'000'001), 2);
  EXPECT_EQ(to_string(whole_run(step, 2, 700)), "the whole run: 8.00 M tokens in 2 steps\n") << "without a device nobody knows how long";
  step.time = StepTime{.seconds = 3.6};
  const WholeRun run = whole_run(step, 1000, 700);
  EXPECT_DOUBLE_EQ(run.tokens, 4e9);
  EXPECT_DOUBLE_EQ(run.seconds.value(), 3600);
  EXPECT_DOUBLE_EQ(run.device_hours.value(), 1024);
  EXPECT_DOUBLE_EQ(run.kilowatt_hours.value(), 716.8);
  EXPECT_EQ(to_string(run), "the whole run: 4.00 B tokens in 1000 steps: 1 h 00 m, 1.02 K device hours, 717 kWh\n");
  WholeRun brief = run;
  brief.device_hours = 1.549;
  EXPECT_NE(to_string(brief).find("1.55 device hours"), std::string::npos) << "the energy beside them has three digits, too";
  const auto energy = [&](double watts) { return to_string(whole_run(step, 1000, watts)); };
  EXPECT_THAT(energy(0.01), HasSubstr(", 0.0102 kWh"));
  EXPECT_THAT(energy(976.5), HasSubstr(", 1 MWh")) << "not 1e+03 kWh";
  EXPECT_THAT(energy(5e6), HasSubstr(", 5.12 GWh"));
  EXPECT_THAT(energy(5e9), HasSubstr(", 5.12 TWh"));
  EXPECT_THAT(to_string(whole_run(step, 240'000, {})), HasSubstr("10.0 days"));
  EXPECT_FALSE(whole_run(step, 1, {}).kilowatt_hours);
  EXPECT_EQ(to_json(run).size(), 5);
}

TEST(WholeRun, ReadsTokens) {
  EXPECT_DOUBLE_EQ(parse_tokens("15T"), 15e12);
  EXPECT_DOUBLE_EQ(parse_tokens("0.3B"), 3e8);
  EXPECT_DOUBLE_EQ(parse_tokens("1.4e12"), 1.4e12);
  for (const char* bad : {"", "T", "-5", "15 T", "15t", "0", "1e30", "nan", "inf", "15TT"}) {
    EXPECT_THAT(refusal([&] { parse_tokens(bad); }), StartsWith(std::string("--tokens = ") + bad + ": expected")) << bad;
  }
}

class Preflight : public testing_support::TrainFixture {};

TEST_F(Preflight, SaysWhatItFound) {
  EXPECT_THAT(preflight(config("llama", {"mesh.tp=2"}), 2, 2, 0), StartsWith("preflight: 2 ranks would meet in all calls of a step; rank "));
}

// Before anything is launched: one stage of a pipeline is told of other sequences than its neighbour.
TEST_F(Preflight, RefusesACollectiveThatDoesNotMatch) {
  const Config piped = config("llama", {"mesh.pp=2"});
  const auto otherwise = [](const Config& told, int rank) {
    Config own = told;
    if (rank == 1) own.data.seq_len = 12;
    return own;
  };
  EXPECT_THAT(refusal([&] { preflight(piped, 2, 2, 0, {.told = otherwise}); }),
              AllOf(StartsWith("mesh: ranks of this layout would wait for each other in vain: "), HasSubstr("sent 2304 bytes"),
                    HasSubstr("received 3072 bytes"), HasSubstr("no run of this one would end")));
  EXPECT_NO_THROW(preflight(piped, 2, 2, 0, {.told = [](const Config& told, int) { return told; }}));
}

TEST_F(Preflight, RefusesWhatDoesNotFit) {
  Config tight = config("llama");
  tight.run.memory_limit_bytes = total_of(largest_class(dry_run(tight, 2)).peak_bytes) - 1;
  EXPECT_THAT(refusal([&] { preflight(tight, 2, 2, 0); }),
              AllOf(StartsWith("run.memory_limit_bytes = " + std::to_string(tight.run.memory_limit_bytes)), HasSubstr(" on rank "), HasSubstr("--set ")));
  const Config any = config("llama");
  const int64_t peak = total_of(largest_class(dry_run(any, 2)).peak_bytes);
  EXPECT_THAT(refusal([&] { preflight(any, 2, 2, peak); }), AllOf(StartsWith("model: --preflight: the 2 ranks on this host need "), HasSubstr("it has ")));
  EXPECT_NO_THROW(preflight(any, 2, 2, 3 * peak));
  EXPECT_THAT(refusal([&] { preflight(any, 4, 4, 3 * peak); }), HasSubstr("the 4 ranks on this host need ")) << "several of a class";
  EXPECT_NO_THROW(preflight(any, 2, 1, peak + peak / 8)) << "one of two hosts";
}

// Two hosts of two stages each: no host has the first stage and the last one, which have the wide table and the head.
TEST_F(Preflight, AHostHasItsOwnRanks) {
  const Config ends = config("llama", {"mesh.pp=4", "model.layers=4", "model.vocab_size=4000"});
  std::vector<int64_t> needs(4);
  for (const RankClass& ranks : dry_run(ends, 4).ranks) {
    for (const int rank : ranks.examples) needs.at(static_cast<size_t>(rank)) = total_of(ranks.peak_bytes) + total_of(ranks.host_bytes);
  }
  const int64_t most = std::max(needs[0] + needs[1], needs[2] + needs[3]);
  ASSERT_LT(most, needs[0] + needs[3]);
  EXPECT_NO_THROW(preflight(ends, 4, 2, most));
  EXPECT_THAT(refusal([&] { preflight(ends, 4, 2, most - 1); }), StartsWith("model: --preflight: the 2 ranks on a host need "));
}

// Messages of a further group of mesh.pp are between stages, wherever mesh.tp puts these in the world.
TEST_F(Preflight, TiedStagesThatUpdateLateMeetBesideTensorParallelism) {
  EXPECT_NO_THROW(preflight(config("llama", {"mesh.pp=2", "mesh.tp=2", "model.tie_embeddings=true", "pipeline.schedule=pipedream_2bw", "optim.max_grad_norm=0",
                                             "batch.global_size=8"}),
                            4, 4, 0));
}

}  // namespace
}  // namespace tessera::plan
