// How other frameworks do our step: their files, what these change of a plan, and nothing else.

#include "tessera/plan/framework.h"

#include <gmock/gmock.h>

#include "tessera/kernels/linear_cross_entropy.h"
#include "tessera/plan/operator_time.h"
#include "tessera/plan/presets.h"
#include "tessera/plan/rank_clock.h"
#include "tests/refusal.h"

namespace tessera::plan {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr const char* kPlainFramework = R"(name = "Theirs"
[settings.precision]
params = "bf16"
[settings.tensor]
sequence_parallel = true
[host]
launch_us = 50
collective_launch_us = 100
pipelined_collective_rank_us = 30
[operators."aten::add"]
launches = 3
passes = 2
[logits]
whole = true
held_bytes = 12
moved_bytes = 8
launches = 2
[memory]
context_gb = 2
kept_per_element = 4
reserve = 1.25
[sources]
all = "this test"
)";

std::string framework_refusal(const std::string& old, const std::string& fresh) {
  std::string text = kPlainFramework;
  text.replace(text.find(old), old.size(), fresh);
  return testing_support::refusal([&] { (void)parse_framework(text, "theirs.toml"); });
}

TEST(Frameworks, ThoseThatTesseraBringsAreReadAndNameTheirSources) {
  EXPECT_THAT(framework_names(), testing::Contains("nanotron"));
  for (const std::string& name : framework_names()) {
    const Framework framework = find_framework(name);
    EXPECT_EQ(framework.key, name);
    EXPECT_TRUE(framework.sources.contains("settings")) << name;
    EXPECT_TRUE(framework.sources.contains("host")) << name;
  }
}

TEST(Frameworks, SettingsOfLayersThatAreCutGoWithTheCut) {
  const Framework framework = parse_framework(kPlainFramework, "theirs.toml");
  EXPECT_THAT(settings_of(framework, /*tp=*/1), ElementsAre("precision.params=bf16"));
  EXPECT_THAT(settings_of(framework, /*tp=*/2), ElementsAre("precision.params=bf16", "tensor.sequence_parallel=true"));
}

TEST(Frameworks, BadFilesAndNamesAreRefused) {
  EXPECT_THAT(testing_support::refusal([] { (void)find_framework("nanotorn"); }),
              AllOf(HasSubstr("--framework = nanotorn"), HasSubstr("did you mean nanotron?")));
  EXPECT_THAT(testing_support::refusal([] { (void)find_framework(::testing::TempDir()); }), HasSubstr("is a folder"));
  EXPECT_THAT(framework_refusal("name = \"Theirs\"", ""), HasSubstr("theirs.toml: name is missing"));
  EXPECT_THAT(framework_refusal("launch_us = 50", "lunch_us = 50"), AllOf(HasSubstr("host.lunch_us is unknown"), HasSubstr("launch_us?")));
  EXPECT_THAT(framework_refusal("launch_us = 50", "launch_us = -1"), HasSubstr("theirs.toml: host.launch_us = -1: expected 0 or a number above it"));
  EXPECT_THAT(framework_refusal("whole = true", "whole = 1"), HasSubstr("logits.whole = 1: expected true or false"));
  EXPECT_THAT(framework_refusal("reserve = 1.25", "reserve = 0.5"), HasSubstr("memory.reserve = 0.5: expected at least 1"));
  EXPECT_THAT(framework_refusal("all = \"this test\"", ""), HasSubstr("sources is missing"));
  EXPECT_THAT(framework_refusal("params = \"bf16\"", "params = [1]"), HasSubstr("settings.precision.params = a list: expected a text"));
  EXPECT_THAT(framework_refusal("[settings.precision]\nparams = \"bf16\"", "[settings]\nprecision = 1"), HasSubstr("settings.precision = 1: expected a table"));
  EXPECT_THAT(framework_refusal("[operators.\"aten::add\"]\nlaunches = 3\npasses = 2", "[operators]\nadd = 1"),
              HasSubstr("is the beginning of no operator's name"));
  for (const char* const unknown : {"tessera::nonesuch", ""}) {
    EXPECT_THAT(framework_refusal("aten::add", unknown), HasSubstr(std::string("operators.\"") + unknown + "\" is the beginning of no operator's name"));
  }
  EXPECT_THAT(framework_refusal("params = \"bf16\"", "params = \"bf17\""),
              AllOf(HasSubstr("precision.params = \"bf17\" (theirs.toml): expected"), HasSubstr("bf16")));
  EXPECT_THAT(framework_refusal("name = \"Theirs\"", "name = \"Th\\u0000\""), HasSubstr("theirs.toml: name = \"Th\\u0000\": holds a zero"));
  EXPECT_THAT(framework_refusal("[host]", "[hosts]"), HasSubstr("hosts is unknown; did you mean host?"));
}

Machine theirs(int pp) {
  Machine machine;
  machine.device = {.flops = {{at::kFloat, 1e12}}, .memory_bandwidth = 1e9, .memory_share = 1, .kernel_gap = 0, .launch = 1e-6, .collective_launch = 1e-6};
  machine.inside = {.bandwidth = 1e9, .latency = 0};
  Config config;
  config.model.vocab_size = 1000;
  config.mesh.pp = pp;
  config.mesh.tp = 2;
  return driven(parse_framework(kPlainFramework, "theirs.toml"), config, machine);
}

double seconds_of(const Machine& machine, const Event& event) {
  RankClock clock(machine, [](const std::string&) { return Placement{.ranks = 4, .hosts = 1, .per_host = 4}; });
  clock.read(event);
  return clock.time().step;
}

TEST(Frameworks, AnOperatorTakesWhatItsLineSaysAndOthersWhatTheyTook) {
  const Event add{.what = OperatorEvent{.name = "aten::add", .shape = {10}, .dtype = at::kFloat, .written_bytes = 1000000}};
  const Event mul{.what = OperatorEvent{.name = "aten::mul", .shape = {10}, .dtype = at::kFloat, .written_bytes = 1000000}};
  EXPECT_NEAR(seconds_of(theirs(1), add), 3 * 50e-6 + 2e-3, 1e-9);
  EXPECT_NEAR(seconds_of(theirs(1), mul), 50e-6 + 1e-3, 1e-9);
}

TEST(Frameworks, CollectivesOfALayerTakeLongerToAskForWhereThereAreStages) {
  const auto call = [](const std::string& group) {
    return Event{.what = CollectiveEvent{.op = "all_gather", .group = group, .sent_bytes = 1000000}, .writes = {-1}};
  };
  EXPECT_NEAR(seconds_of(theirs(1), call("tp")), 100e-6 + 1e-3, 1e-9);
  EXPECT_NEAR(seconds_of(theirs(2), call("tp")), 100e-6 + 4 * 30e-6 + 1e-3, 1e-9);
  EXPECT_NEAR(seconds_of(theirs(2), call("dp_shard")), 100e-6 + 1e-3, 1e-9);
}

TEST(Frameworks, LogitsAreKnownByTheirColumns) {
  const auto product = [](int64_t columns) {
    return Event{.what = OperatorEvent{.name = "aten::mm", .shape = {1000, columns}, .dtype = at::kFloat, .flops = 1}};
  };
  EXPECT_NEAR(seconds_of(theirs(1), product(500)) - seconds_of(theirs(1), product(499)), 8 * 500 * 1000 / 1e9, 1e-4);
}

TEST(Frameworks, AttentionThatKeepsItsScoresPassesOverThem) {
  DeviceRates device{.flops = {{at::kFloat, 1e18}}, .memory_bandwidth = 1e9, .memory_share = 1};
  const OperatorEvent attention{.name = "aten::attention", .shape = {2, 3, 64, 16}, .dtype = at::kFloat, .flops = 1};
  const OperatorHabit once{.name = "aten::attention", .score_passes = 1}, twice{.name = "aten::attention", .score_passes = 2};
  EXPECT_NEAR(operator_seconds(attention, device, &twice) - operator_seconds(attention, device, &once), 2 * 3 * 64 * 64 * 4 / 1e9, 1e-12);
}

TEST(Frameworks, WhatTheyHoldBesideTensors) {
  Config config =
      preset("7b", {"model.layers=1", "model.dim=64", "model.heads=2", "model.kv_heads=2", "model.vocab_size=100", "data.seq_len=32", "batch.global_size=2"})
          ->config;
  resolve(config);
  const DryRun run = dry_run(config, 1);
  const double alive = static_cast<double>(total_of(largest_class(run).peak_bytes));
  const Framework framework = parse_framework(kPlainFramework, "theirs.toml");
  const double tokens = static_cast<double>(config.batch.micro_size) * 32;
  const double plain = alive + 12 * tokens * 100 + 4 * tokens * 64;
  EXPECT_DOUBLE_EQ(reserved_bytes(framework, config, run, /*reserve=*/false), plain);
  EXPECT_DOUBLE_EQ(reserved_bytes(framework, config, run), 1.25 * plain);
  EXPECT_EQ(framework.context_bytes, 2e9);
}

TEST(Frameworks, WhatTheyHoldOfAParameterCountsWhatOurStepHoldsOfIt) {
  const auto config_of = [](const std::vector<std::string>& sets) {
    std::vector<std::string> all{"model.layers=2",       "model.dim=64",    "model.heads=2",       "model.kv_heads=2",
                                 "model.vocab_size=100", "data.seq_len=32", "batch.global_size=4", "batch.micro_size=1"};
    all.insert(all.end(), sets.begin(), sets.end());
    Config config = preset("7b", all)->config;
    resolve(config);
    return config;
  };
  const std::string held = std::string(kPlainFramework) + "[memory]\nheld_per_parameter = 3\nheld_when_sharded = 5\nheld_per_sharded = 8\n";
  std::string text = held;
  text.erase(text.find("[memory]\ncontext_gb"), text.find("[sources]") - text.find("[memory]\ncontext_gb"));
  const Framework framework = parse_framework(text, "theirs.toml");
  std::string without = text;
  without.erase(without.find("[memory]"));
  const Framework plain = parse_framework(without, "theirs.toml");
  const auto beside = [&](const Config& config, int world) {
    const DryRun run = dry_run(config, world);
    const auto parameters = static_cast<double>(run.ranks.front().parameters), waiting = static_cast<double>(run.ranks.front().peak_bytes.back());
    return (reserved_bytes(framework, config, run) - reserved_bytes(plain, config, run) + waiting) / parameters;
  };
  EXPECT_NEAR(beside(config_of({}), 1), 3, 1e-6);
  EXPECT_NEAR(beside(config_of({"mesh.dp_replicate=4", "zero.stage=0"}), 4), 3, 1e-6);
  EXPECT_NEAR(beside(config_of({"mesh.dp_shard=4", "zero.stage=1"}), 4), 5 + 8.0 / 4, 1e-6);
  EXPECT_NEAR(beside(config_of({"mesh.dp_shard=-1", "zero.stage=1"}), 2), 5 + 8.0 / 2, 1e-6);
  EXPECT_NEAR(beside(config_of({"mesh.dp_shard=1", "zero.stage=1"}), 1), 3, 1e-6) << "nothing is sharded over one rank";

  const Config cut = config_of({"mesh.pp=2", "mesh.dp_shard=1"});
  const DryRun run = dry_run(cut, 2);
  const double first = reserved_bytes(framework, cut, run, true, 0), last = reserved_bytes(framework, cut, run, true, 1);
  EXPECT_NE(first, last);
  EXPECT_EQ(reserved_bytes(framework, cut, run), std::max(first, last));
}

TEST(Frameworks, StagesTakeLinksUntilTheirWeightsExceedAShare) {
  // 16 layers of 67.1 million, and a head of 268 million: 20 layers' worth, of which each of two has 10, and the one that reaches that exactly takes one more.
  ModelConfig model;
  model.family = "llama", model.layers = 16, model.dim = 2048, model.vocab_size = 131072, model.ffn_dim = 8192;
  EXPECT_THAT(stages_by_weights(model, 2), ElementsAre("12", "6"));
  EXPECT_THAT(stages_by_weights(model, 3), ElementsAre("8", "7", "3"));
  EXPECT_THAT(stages_by_weights(model, 1), ElementsAre("18"));
  EXPECT_THAT(stages_by_weights(model, 16), ElementsAre("cost")) << "the head alone is more than three shares: the last stages would be empty";
}

TEST(Frameworks, WholeLogitsAreOneChunk) {
  EXPECT_LT(kernels::linear_cross_entropy_chunk(4096, 100000, at::kFloat), 4096);
  {
    const kernels::WholeLogitsGuard whole;
    EXPECT_EQ(kernels::linear_cross_entropy_chunk(4096, 100000, at::kFloat), 4096);
  }
  EXPECT_LT(kernels::linear_cross_entropy_chunk(4096, 100000, at::kFloat), 4096);
}

}  // namespace
}  // namespace tessera::plan
