#include "tessera/plan/search.h"

#include <algorithm>
#include <fstream>
#include <limits>
#include <set>
#include <tuple>

#include <gmock/gmock.h>

#include "tessera/core/error.h"
#include "tessera/pipeline/schedules/csv.h"
#include "tessera/plan/device.h"
#include "tessera/plan/dry_run.h"
#include "tessera/plan/estimate.h"
#include "tessera/plan/presets.h"
#include "tessera/plan/settings.h"
#include "tessera/train/places.h"
#include "tests/refusal.h"
#include "tests/train/fixture.h"

namespace tessera::plan {
namespace {

using testing::AllOf;
using testing::Contains;
using testing::Field;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::Not;
using testing::SizeIs;
using testing_support::refusal;

class SearchTest : public testing_support::TrainFixture {
 protected:
  Config small(std::vector<std::string> sets = {}, const std::string& family = "llama") const {
    sets.insert(sets.end(), {"run.steps=3", "model.layers=4", "batch.global_size=16"});
    Config made = config(family, sets);
    made.run.memory_limit_bytes = int64_t{1} << 40;
    return made;
  }
  static Machine machine() {
    Device device = find_device("h100");
    device.devices_per_node = 4;
    return machine_of(device);
  }
  static SearchOptions patient() { return {.patience = std::chrono::seconds(600)}; }
};

TEST_F(SearchTest, ChoicesAreDifferentAndUseEveryRank) {
  const Config config = small();
  const auto all = all_choices(config, 8, machine(), {16, 32});
  std::set<LayoutChoice> different(all.begin(), all.end());
  EXPECT_EQ(different.size(), all.size());
  for (const LayoutChoice& choice : all) {
    EXPECT_EQ(choice.tp * choice.pp * choice.cp * choice.data_ranks(8), 8) << to_string(choice, 8);
    EXPECT_EQ(choice.data_ranks(8) % choice.shard, 0) << to_string(choice, 8);
    EXPECT_GE(choice.micro_batches(8), 1) << to_string(choice, 8);
  }
  for (const int tp : {1, 2, 4}) EXPECT_THAT(all, Contains(Field(&LayoutChoice::tp, tp)));
  for (const int64_t batch : {16, 32}) EXPECT_THAT(all, Contains(Field(&LayoutChoice::batch, batch)));
  EXPECT_THAT(all, Not(Contains(Field(&LayoutChoice::pp, 8)))) << "of four layers";
}

TEST_F(SearchTest, NeighboursDifferAndUseEveryRank) {
  const Config config = small();
  for (const LayoutChoice& at : {LayoutChoice{.batch = 16}, LayoutChoice{.tp = 2, .pp = 2, .stage = 1, .shard = 2, .batch = 16, .micro_size = 2},
                                 LayoutChoice{.tp = 2, .cp = 4, .stage = 3, .batch = 16}}) {
    const auto all = neighbours_of(at, config, 8, machine(), /*fewest_columns=*/1);
    EXPECT_THAT(all, Not(IsEmpty()));
    for (const auto& [what, next] : all) {
      EXPECT_NE(next, at) << what;
      EXPECT_EQ(next.tp * next.pp * next.cp * next.data_ranks(8), 8) << what;
      EXPECT_EQ(next.stage == 0, next.shard * next.cp == 1 || (next.stage == 0 && next.cp > 1)) << what;
      EXPECT_TRUE(next.stage == 0 || next.shard * next.cp > 1) << what << ": nobody shares the state out";
    }
  }
}

/// What training takes the search offers, though parts are uneven: tp 3 of 128 features, cp 3 of 8 columns, and interleaved with fewer micro-batches than two
/// for each stage.
TEST_F(SearchTest, UnevenPartsAreAmongTheLayouts) {
  Config config = small({"model.heads=6", "model.dim=48", "model.ffn_dim=128", "model.layers=4", "data.seq_len=8"});
  config.batch.global_size = 6;
  std::set<std::string> found;
  for (const int world : {3, 2}) {
    for (const LayoutChoice& choice : all_choices(config, world, machine(), {6}, /*fewest_columns=*/1)) {
      if (choice.tp == 3) found.insert("tp 3");
      if (choice.cp == 3) found.insert("cp 3");
      if (choice.schedule == "interleaved" && choice.pp == 2 && choice.micro_batches(world) == 3) found.insert("interleaved, 3 over 2");
      validate(with_settings(config, settings_of(choice, world)), world, Purpose::Plan);
    }
  }
  EXPECT_THAT(found, testing::ElementsAre("cp 3", "interleaved, 3 over 2", "tp 3"));
}

/// Sizes and steps are those of the world and the batch, powers of two or not.
TEST_F(SearchTest, WhatIsNoPowerOfTwoIsGoneThroughByItsDivisors) {
  Config config = small();
  config.model.layers = config.model.heads = 9;
  std::set<int64_t> sizes;
  for (const LayoutChoice& choice : all_choices(config, 3, machine(), {27})) sizes.insert(choice.micro_size);
  EXPECT_THAT(sizes, testing::ElementsAre(1, 3, 9));
  const auto whats_of = [&](const LayoutChoice& at, int world) {
    std::vector<std::string> whats;
    for (const Neighbour& next : neighbours_of(at, config, world, machine())) {
      if (std::ranges::any_of(std::vector{"tp", "pp", "micro"}, [&](const char* name) { return next.what.starts_with(name); })) whats.push_back(next.what);
    }
    return whats;
  };
  EXPECT_THAT(whats_of({.batch = 27, .micro_size = 3}, 3), testing::ElementsAre("tp 3", "pp 3", "micro 9", "micro 1"));
  EXPECT_THAT(whats_of({.tp = 3, .batch = 27}, 9), testing::ElementsAre("tp 9", "tp 1", "pp 3", "tp 1 and pp 3", "micro 3"));
  EXPECT_THAT(whats_of({.tp = 4, .batch = 24, .micro_size = 3}, 12),
              testing::ElementsAre("tp 6", "tp 3", "tp 2", "pp 3", "tp 2 and pp 2", "micro 4", "micro 6", "micro 2", "micro 1"))
      << "by a prime, too, and not to the next alone";
  EXPECT_THAT(whats_of({.tp = 2, .pp = 2, .batch = 16, .micro_size = 2}, 8),
              testing::ElementsAre("tp 4", "tp 1", "pp 4", "pp 1", "tp 4 and pp 1", "tp 1 and pp 4", "micro 4", "micro 1"));
}

/// mesh.cp's ranks share out the state of what they compute alike (docs/sharding.md).
TEST_F(SearchTest, RanksOfASequenceShareTheStateOfItsDataRank) {
  Config config = small({"data.seq_len=32", "model.dim=64"});
  config.batch.global_size = 1;
  std::set<int> stages;
  for (const LayoutChoice& choice : all_choices(config, 4, machine(), {1}, /*fewest_columns=*/8)) {
    if (choice.cp == 4) stages.insert(choice.stage);
  }
  EXPECT_THAT(stages, testing::ElementsAre(0, 1, 2, 3));
  const auto whats_of = [&](const LayoutChoice& at) {
    std::set<std::string> whats;
    for (const Neighbour& next : neighbours_of(at, config, 4, machine(), /*fewest_columns=*/8)) whats.insert(next.what);
    return whats;
  };
  EXPECT_THAT(whats_of({.cp = 4}), AllOf(Contains("zero 1"), Contains("zero 3")));
  for (const Neighbour& next : neighbours_of({.cp = 4, .stage = 3}, config, 4, machine(), /*fewest_columns=*/8)) {
    if (next.choice.cp > 1 && !next.what.starts_with("zero")) EXPECT_EQ(next.choice.stage, 3) << next.what;
    validate(with_settings(config, settings_of(next.choice, 4)), 4, Purpose::Plan);
  }

  SearchOptions cut = patient();
  cut.fewest_columns = 8;
  cut.on_the_host = false;
  cut.admits = [](const LayoutChoice& choice) { return choice.cp == 4 && choice.recompute == "none"; };
  int64_t least = INT64_MAX;
  for (const int stage : {0, 1, 2}) {
    const Config lower = with_settings(config, settings_of({.cp = 4, .stage = stage}, 4));
    least = std::min(least, total_of(largest_class(dry_run(lower, 4)).peak_bytes));
  }
  config.run.memory_limit_bytes = least - 1;
  const LayoutSearch found = search_layouts(config, 4, machine(), cut);
  ASSERT_NE(found.best(), nullptr) << to_string(found);
  EXPECT_EQ(found.best()->choice.stage, 3);
}

/// Routers that look at whole passes allow no cut sequence, and mesh.tp without one.
TEST_F(SearchTest, WhereRoutersSeeWholePassesTensorParallelismGoesWithoutThatOfSequences) {
  for (const std::string set : {"moe.capacity_factor=1.25", "model.router=expert_choice"}) {
    SCOPED_TRACE(set);
    Config config = small({set, "model.layers=1"}, "mixtral");
    config.batch.global_size = 2;
    SearchOptions options = patient();
    options.admits = [](const LayoutChoice& choice) { return choice.tp == 2 && choice.recompute == "none"; };
    const LayoutSearch found = search_layouts(config, 2, machine(), options);
    ASSERT_NE(found.best(), nullptr) << to_string(found);
    EXPECT_THAT(settings_of(found.best()->choice, 2), Contains("tensor.sequence_parallel=false"));
    EXPECT_THAT(to_string(found), HasSubstr("tp 2 without sp"));
  }
}

TEST_F(SearchTest, WhereRulesRefuseAllMemoryIsNotToBlame) {
  Config config = small({"run.deterministic=true"});
  SearchOptions options = patient();
  options.admits = [](const LayoutChoice& choice) { return choice.stage > 0 && choice.tp == 1; };
  const LayoutSearch none = search_layouts(config, 2, machine(), options);
  ASSERT_EQ(none.best(), nullptr);
  EXPECT_TRUE(none.exhausted);
  EXPECT_EQ(none.refused, none.possible);
  EXPECT_FALSE(none.smallest_world || none.most_ruled_out > 0) << "more devices change no rule";
  EXPECT_THAT(to_string(none), AllOf(HasSubstr("all are refused, however much memory there is: run.deterministic"), Not(HasSubstr("none fits")),
                                     Not(HasSubstr("of these devices"))));
}

/// Over what mesh.ep leaves of mesh.tp experts are whole, or cut: whichever is faster and fits.
TEST_F(SearchTest, ExpertsAreCutOverTheRanksThatDealNone) {
  const Config config = small({"model.experts=4", "model.ffn_dim=160"}, "mixtral");
  std::set<std::tuple<int, int, int>> dealt;  // stage, ep, expert_tp
  for (const LayoutChoice& choice : all_choices(config, 4, machine(), {16})) {
    if (choice.tp != 4) continue;
    dealt.emplace(choice.stage, choice.ep, choice.expert_tp);
    validate(with_settings(config, settings_of(choice, 4)), 4, Purpose::Plan);
  }
  EXPECT_THAT(dealt, testing::ElementsAre(std::tuple(0, 1, 1), std::tuple(0, 1, 4), std::tuple(0, 2, 1), std::tuple(0, 2, 2), std::tuple(0, 4, 1)));
  const auto has = [&](const LayoutChoice& at, const std::string& what, int expert_tp) {
    for (const Neighbour& next : neighbours_of(at, config, 4, machine())) {
      if (next.what == what) return next.choice.expert_tp == expert_tp;
    }
    return false;
  };
  EXPECT_TRUE(has({.tp = 4, .batch = 16}, "expert tp 4", 4));
  EXPECT_TRUE(has({.tp = 4, .batch = 16, .expert_tp = 4}, "experts whole", 1));
  EXPECT_TRUE(has({.tp = 4, .batch = 16, .expert_tp = 4}, "ep 2", 2)) << "cut, over the rest";
  EXPECT_TRUE(has({.tp = 4, .batch = 16, .expert_tp = 4}, "tp 2", 2));
}

/// The sets of a layout unsay what its file says of another, in place of which they stand.
TEST_F(SearchTest, SettingsSayWhatHoldsOfEveryLayoutToo) {
  const std::vector<std::string> beside{"mesh.tp=1", "recompute.ffn_tile=0", "offload.optimizer=device", "pipeline.split=[\"auto\"]"};
  const auto sets = settings_of({.tp = 2, .batch = 16, .host_optimizer = true}, 2, beside);
  EXPECT_THAT(sets, AllOf(Contains("mesh.tp=2"), Not(Contains("mesh.tp=1")), Contains("recompute.ffn_tile=0"), Contains("offload.optimizer=host"),
                          Not(Contains("offload.optimizer=device"))));
  EXPECT_THAT(flags_of(sets), AllOf(HasSubstr("--set mesh.tp=2 "), HasSubstr("--set 'pipeline.split=[\"auto\"]'"))) << "as a shell takes it";
}

/// What leaves a layout out has to be below what the run needs.
TEST_F(SearchTest, TheStateOfAnEstimateIsALowerBound) {
  const std::string adapted = "lora.modules=layers.*.**", quantized = "quantize.modules=layers.*.**";
  const auto compared = [&](const std::vector<std::string>& sets, int world, const std::string& family = "llama") {
    const Config config = small(sets, family);
    const Estimator guess(config, world, machine());
    int count = 0;
    for (const LayoutChoice& choice : all_choices(config, world, machine(), {16})) {
      if (choice.recompute != "none" || choice.micro_size > 1 || choice.schedule != "1f1b" || choice.pp > 2 || choice.cp > 1) continue;
      try {
        const Config changed = with_settings(config, settings_of(choice, world));
        validate(changed, world, Purpose::Plan);
        int64_t most = 0;
        for (const auto& ranks : dry_run(changed, world).ranks) most = std::max(most, total_of(ranks.peak_bytes));
        EXPECT_LE(guess(choice).state_bytes, static_cast<double>(most)) << to_string(choice, world);
        ++count;
      } catch (const ConfigError&) {
        continue;
      }
    }
    return count;
  };
  EXPECT_GE(compared({}, 4), 8);
  // What is trained, and in what, is said of each part, however many there are.
  const std::string params = "precision.params=bf16", compute = "precision.compute=bf16", reduce = "precision.reduce=bf16", master = "precision.master=bf16";
  for (const std::vector<std::string>& sets : {std::vector<std::string>{"optim.name=lion"},
                                               {"optim.name=muon"},
                                               {"optim.groups=[\"layers.*: name = lion\"]"},
                                               {params, compute},
                                               {params, compute, reduce},
                                               {params, compute, reduce, master},
                                               {adapted},
                                               {adapted, "lora.trained=head.weight"},
                                               {adapted, quantized},
                                               {adapted, quantized, "quantize.format=int8", "quantize.block=16"},
                                               {adapted, quantized, "quantize.double_scales=true"}}) {
    EXPECT_GE(compared(sets, 2), 4) << testing::PrintToString(sets);
  }
  // Experts are dealt over other ranks than the rest, and so much of the model that what is said of them counts.
  EXPECT_GE(compared({"model.experts=4", "model.ffn_dim=160"}, 4, "mixtral"), 8);
}

TEST_F(SearchTest, TheStateOfAnEstimateIsTheTextbooks) {
  const Config config = small();
  const Estimator guess(config, 4, machine());
  const double elements = guess({.batch = 16}).state_bytes / 16;
  EXPECT_DOUBLE_EQ(guess({.stage = 1, .shard = 4, .batch = 16}).state_bytes, elements * (4 + 4 + 8.0 / 4));
  EXPECT_DOUBLE_EQ(guess({.stage = 2, .shard = 4, .batch = 16}).state_bytes, elements * (4 + 12.0 / 4));
  EXPECT_DOUBLE_EQ(guess({.stage = 3, .shard = 2, .batch = 16}).state_bytes, elements * 16 / 2);
  EXPECT_DOUBLE_EQ(guess({.tp = 2, .pp = 2, .batch = 16}).state_bytes, elements * 16 / 4);
}

/// The same as a run keeps, whatever the precision.
TEST_F(SearchTest, TheStateOfAnEstimateKnowsThePrecision) {
  const auto state = [&](const std::vector<std::string>& sets) { return Estimator(small(sets), 1, machine())({.batch = 16}).state_bytes; };
  const double elements = state({}) / 16;
  const std::string params = "precision.params=bf16", compute = "precision.compute=bf16", reduce = "precision.reduce=bf16", master = "precision.master=bf16";
  EXPECT_DOUBLE_EQ(state({params, compute, reduce, master}), elements * (2 + 2 + 4));
  EXPECT_DOUBLE_EQ(state({params, compute, reduce, master, "optim.name=lion"}), elements * (2 + 2 + 2));
  EXPECT_DOUBLE_EQ(state({params, compute}), elements * (2 + 4 + 12));
  const double grouped = state({"optim.groups=[\"layers.*: name = lion\"]"});
  EXPECT_LT(grouped, elements * 16);
  EXPECT_GT(grouped, elements * 12) << "embedding and head keep two moments";
  EXPECT_DOUBLE_EQ(state({"precision.compute=auto"}), elements * 16);
}

/// Of experts as docs/moe.md: mesh.ep deals what is whole, and all of dp_shard x cp x tp share what is sharded.
TEST_F(SearchTest, TheStateOfAnEstimateOfExpertsIsWhatTheirRanksShareOut) {
  const Config config = small({"model.experts=4", "model.ffn_dim=160"}, "mixtral");
  const Estimator guess(config, 8, machine());
  double dense = 0, experts = 0;
  for (const PlacedElements& kind : count_elements(config).elements) (kind.expert ? experts : dense) += kind.count;
  const auto state = [&](LayoutChoice choice) {
    choice.batch = 16;
    return guess(choice).state_bytes;
  };
  EXPECT_DOUBLE_EQ(state({.tp = 2}), 16 * (dense / 2 + experts)) << "of ranks that share nothing out each has all experts";
  for (const int ep : {1, 2, 4}) {
    EXPECT_DOUBLE_EQ(state({.tp = 2, .ep = ep, .stage = 1, .shard = 4}), 8 * (dense / 2 + experts / ep) + 8 * (dense / 8 + experts / 8));
    EXPECT_DOUBLE_EQ(state({.tp = 2, .ep = ep, .stage = 2, .shard = 4}), 4 * (dense / 2 + experts / ep) + 12 * (dense / 8 + experts / 8));
    EXPECT_DOUBLE_EQ(state({.tp = 2, .cp = 2, .ep = ep, .stage = 3, .shard = 2}), 16 * (dense / 8 + experts / 8));
    EXPECT_DOUBLE_EQ(state({.pp = 2, .ep = ep, .stage = 1, .shard = 4}), (8 * (dense + experts / ep) + 8 * (dense / 4 + experts / 4)) / 2);
  }
}

/// What LoRA freezes has no gradient and no optimizer state, and what is in fewer bits has not even its parameters' bytes.
TEST_F(SearchTest, TheStateOfAnEstimateKnowsWhatIsFrozenAndWhatIsInFewerBits) {
  const auto state = [&](const std::vector<std::string>& sets) { return Estimator(small(sets), 1, machine())({.batch = 16}).state_bytes; };
  const std::string adapted = "lora.modules=layers.*.**", quantized = "quantize.modules=layers.*.**";
  const double all = state({}), frozen = state({adapted}), narrow = state({adapted, quantized});
  EXPECT_LT(frozen, all);
  EXPECT_GT(frozen, all / 4) << "the parameters themselves, in fp32";
  EXPECT_LT(narrow, frozen);
  EXPECT_GT(state({adapted, quantized, "quantize.format=int8"}), narrow);
  EXPECT_LT(state({adapted, quantized, "quantize.double_scales=true"}), narrow);
}

TEST_F(SearchTest, FindsWhatFitsOfFrozenAndOfQuantizedWeights) {
  const std::vector<std::string> wide{"model.dim=256", "model.ffn_dim=512"};
  const double trained = Estimator(small(wide), 1, machine())({.batch = 16}).state_bytes;
  const std::string adapted = "lora.modules=layers.*.**", quantized = "quantize.modules=layers.*.**";
  for (std::vector<std::string> sets : {std::vector<std::string>{adapted}, {adapted, quantized}}) {
    sets.insert(sets.end(), wide.begin(), wide.end());
    Config config = small(sets);
    const int64_t needed = total_of(largest_class(dry_run(with_settings(config, {"batch.micro_size=1", "recompute.mode=full"}), 1)).peak_bytes);
    ASSERT_GT(trained, static_cast<double>(needed)) << "or nothing is shown";
    config.run.memory_limit_bytes = needed;
    const LayoutSearch found = search_layouts(config, 1, machine(), patient());
    EXPECT_NE(found.best(), nullptr) << to_string(found);
    EXPECT_EQ(found.too_large, 0);
  }
}

/// What was not run may fit.
TEST_F(SearchTest, SaysOfASearchThatWasCutShortWhatItRanAndNoMore) {
  Config config = small();
  config.run.memory_limit_bytes = static_cast<int64_t>(Estimator(config, 1, machine())({.batch = 16}).state_bytes);  // nothing is left for activations
  SearchOptions few = patient();
  few.most_runs = 1;
  const LayoutSearch one = search_layouts(config, 1, machine(), few);
  ASSERT_EQ(one.best(), nullptr);
  EXPECT_FALSE(one.exhausted);
  EXPECT_THAT(to_string(one), AllOf(HasSubstr("the one that was run does not fit"), HasSubstr("(--patience)"), Not(HasSubstr("none fits"))));

  LayoutSearch found{.world = 64, .limit = 1 << 30, .possible = 100, .complete = false, .ranked = {Tried{}, Tried{}}, .most_looked_at = 2048};
  EXPECT_THAT(to_string(found), AllOf(HasSubstr("none of the 2 that were run fits"), HasSubstr("nor does what was run of up to 2048 of these devices"),
                                      HasSubstr("(--patience)"), Not(HasSubstr("nor does it in"))));
  found.complete = found.exhausted = true, found.most_ruled_out = 2048;
  EXPECT_THAT(to_string(found), AllOf(HasSubstr("none fits in"), HasSubstr("nor does it in 2048 of these devices"), Not(HasSubstr("patience"))));
}

/// Of layouts that are as fast the search names the one whose neighbours it has run: the one that needs least.
TEST_F(SearchTest, OfEqualsTheOneIsNamedThatItEndedAt) {
  const Config config = small();
  const auto at_once = [](Config&) {
    Machine machine = SearchTest::machine();
    constexpr double all = std::numeric_limits<double>::infinity();
    machine.device = {.flops = {{at::kFloat, all}}, .memory_bandwidth = all, .kernel_gap = 0, .launch = 0, .collective_launch = 0};
    machine.inside = {.bandwidth = all};
    return machine;
  };
  SearchOptions options = patient();
  options.admits = [](const LayoutChoice& choice) { return choice.tp * choice.pp == 1 && choice.recompute != "selective"; };
  options.driven = at_once;
  const LayoutSearch found = search_layouts(config, 4, machine(), options);
  ASSERT_NE(found.best(), nullptr);
  ASSERT_TRUE(found.complete);
  for (const Tried& tried : found.ranked) {
    EXPECT_EQ(tried.time.seconds, 0);
    EXPECT_LE(found.best()->needed_bytes, tried.needed_bytes) << to_string(tried.choice, 4);
  }
  const auto neighbours = neighbours_of(found.best()->choice, config, 4, machine());
  const auto admitted = static_cast<size_t>(std::ranges::count_if(neighbours, options.admits, &Neighbour::choice));
  EXPECT_THAT(found.losing, SizeIs(admitted)) << to_string(found);
}

/// More ranks than the step has sequences for are no world of which anything is known.
TEST_F(SearchTest, WorldsThatAStepDoesNotFillAreNotRuledOut) {
  Config config = small({"model.heads=2"});
  config.model.layers = config.batch.global_size = 1;
  config.run.memory_limit_bytes = 4096;
  const LayoutSearch none = search_layouts(config, 1, machine(), patient());
  ASSERT_EQ(none.best(), nullptr);
  EXPECT_EQ(none.most_ruled_out, 2);
  EXPECT_EQ(none.too_many_for_a_step, 4);
  EXPECT_THAT(to_string(none),
              AllOf(HasSubstr("nor does it in 2 of these devices; a step has too few sequences for 4 of these devices"), HasSubstr("--batch")));
}

/// Whose choices and uneven stages weigh: formulas that miss them try what does not fit first.
TEST_F(SearchTest, OfAMixtureWhatFitsIsAmongTheFirst) {
  Config config = preset("mixtral-8x7b", {}).value().config;
  resolve(config);
  config.run.memory_limit_bytes = static_cast<int64_t>(find_device("h100").memory_bytes);
  SearchOptions few = patient();
  few.most_runs = 4;
  few.on_the_host = false;
  const LayoutSearch found = search_layouts(config, 64, machine_of(find_device("h100")), few);
  EXPECT_NE(found.best(), nullptr) << to_string(found);
}

TEST_F(SearchTest, AWholeSearchThatFindsNothingSaysSo) {
  Config config = small();
  config.run.memory_limit_bytes = 4096;
  const LayoutSearch none = search_layouts(config, 1, machine(), patient());
  EXPECT_TRUE(none.exhausted);
  EXPECT_EQ(none.most_looked_at, 0);
  EXPECT_THAT(to_string(none), AllOf(HasSubstr("none fits in"), HasSubstr("nor does it in")));
}

/// A mixture's terms of a micro-batch are another objective in another micro-batch.
TEST_F(SearchTest, SaysWhereAnotherMicroBatchTrainsAnotherObjective) {
  const auto observed = [&](std::optional<int64_t> given, const std::vector<std::string>& sets, const std::string& family = "mixtral") {
    std::vector<std::string> all{"run.steps=3", "batch.global_size=16"};
    all.insert(all.end(), sets.begin(), sets.end());
    Config mixture = config(family, all);
    mixture.run.memory_limit_bytes = int64_t{1} << 40;
    SearchOptions options{.patience = std::chrono::seconds(600), .most_runs = 1, .micro_size = given};
    options.admits = [](const LayoutChoice& choice) { return choice.micro_size == 4; };
    const LayoutSearch found = search_layouts(mixture, 1, machine(), options);
    EXPECT_NE(found.best(), nullptr);
    return testing::PrintToString(found.observations);
  };
  const std::string another = "trains another objective";
  EXPECT_THAT(observed(2, {}), AllOf(HasSubstr("batch.micro_size = 4 where it was 2 " + another), HasSubstr("moe.balance_loss, moe.z_loss"),
                                     HasSubstr("--set batch.micro_size=2")));
  EXPECT_THAT(observed(4, {}), Not(HasSubstr(another)));
  EXPECT_THAT(observed(std::nullopt, {}), Not(HasSubstr(another)));
  EXPECT_THAT(observed(2, {"moe.balance_loss=0", "moe.z_loss=0"}), Not(HasSubstr(another)));
  EXPECT_THAT(observed(2, {"moe.balance_loss=0", "moe.z_loss=0", "moe.capacity_factor=1.25"}), HasSubstr("moe.capacity_factor"));
  EXPECT_THAT(observed(2, {"moe.balance_loss=0", "moe.z_loss=0", "model.router=expert_choice"}), HasSubstr("model.router = expert_choice"));
  EXPECT_THAT(observed(2, {}, "llama"), Not(HasSubstr(another)));
}

TEST_F(SearchTest, SettingsSayTheWholeChoice) {
  const LayoutChoice choice{
      .tp = 2, .pp = 2, .stage = 1, .shard = 2, .batch = 16, .micro_size = 2, .recompute = "full", .schedule = "interleaved", .chunks = 2};
  const Config config = with_settings(small(), settings_of(choice, 16));
  EXPECT_EQ(config.mesh.tp, 2);
  EXPECT_EQ(config.mesh.pp, 2);
  EXPECT_EQ(config.mesh.dp_shard, 2);
  EXPECT_EQ(config.mesh.dp_replicate, 2);
  EXPECT_EQ(config.zero.stage, 1);
  EXPECT_EQ(config.batch.micro_size, 2);
  EXPECT_EQ(config.recompute.mode, "full");
  EXPECT_EQ(config.pipeline.schedule, "interleaved");
  EXPECT_EQ(config.pipeline.virtual_stages, 2);
  EXPECT_TRUE(config.tensor.sequence_parallel);
  validate(config, 16, Purpose::Plan);
  const Config other = with_settings(with_settings(config, {"mesh.expert_tp=2"}), settings_of({.batch = 16}, 1));
  EXPECT_EQ(other.pipeline.schedule, "1f1b") << "whatever there was before";
  EXPECT_EQ(other.pipeline.virtual_stages, 1);
  EXPECT_EQ(other.mesh.expert_tp, 1);
}

/// Every layout that is there, run dry: the one that the search names first takes no longer than any.
TEST_F(SearchTest, FindsTheFastestOfAll) {
  Config config = small({"model.dim=64", "model.layers=2"});
  config.batch.global_size = 8;
  config.model.layers = 2;
  const Machine h100 = machine();
  const LayoutSearch found = search_layouts(config, 4, h100, patient());
  ASSERT_NE(found.best(), nullptr);
  double fastest = found.best()->time.seconds;
  std::string name;
  for (const LayoutChoice& choice : all_choices(config, 4, h100, {8})) {
    if (choice.recompute == "selective" || choice.stage == 2) continue;
    try {
      const Config changed = with_settings(config, settings_of(choice, 4));
      validate(changed, 4, Purpose::Plan);
      const double seconds = dry_run(changed, 4, {.machine = h100}).time->seconds;
      if (seconds < fastest * 0.98) fastest = seconds, name = to_string(choice, 4);
    } catch (const ConfigError&) {
      continue;
    }
  }
  EXPECT_EQ(name, "") << "takes " << fastest << " s, " << to_string(found.best()->choice, 4) << " " << found.best()->time.seconds;
}

TEST_F(SearchTest, TheWinnerIsWhatItsSettingsArePlannedAs) {
  const Config config = small();
  const LayoutSearch found = search_layouts(config, 4, machine(), patient());
  ASSERT_NE(found.best(), nullptr);
  EXPECT_TRUE(found.complete);
  const DryRun run = dry_run(with_settings(config, settings_of(found.best()->choice, 4)), 4, {.machine = machine()});
  EXPECT_DOUBLE_EQ(run.time->seconds, found.best()->time.seconds);
  EXPECT_EQ(total_of(largest_class(run).peak_bytes), found.best()->peak_bytes);
  EXPECT_TRUE(std::ranges::is_sorted(found.ranked, {}, [](const Tried& tried) { return tried.time.seconds; }));
  EXPECT_THAT(found.losing, SizeIs(neighbours_of(found.best()->choice, config, 4, machine()).size())) << "all were looked at";
  for (const Loses& other : found.losing)
    EXPECT_THAT(other.reason, testing::AnyOf(HasSubstr("slower"), HasSubstr("needs"), HasSubstr("refused"), "as fast")) << other.what;
  EXPECT_THAT(to_string(found), HasSubstr(to_string(found.best()->choice, 4)));
}

TEST_F(SearchTest, LessMemoryBringsAnotherLayoutAndTooLittleTheNumberOfDevices) {
  Config config = small();
  const LayoutSearch all = search_layouts(config, 4, machine(), patient());
  ASSERT_NE(all.best(), nullptr);
  config.run.memory_limit_bytes = all.best()->peak_bytes - 1;
  const LayoutSearch less = search_layouts(config, 4, machine(), patient());
  ASSERT_NE(less.best(), nullptr);
  EXPECT_LT(less.best()->peak_bytes, all.best()->peak_bytes);
  EXPECT_GE(less.best()->time.seconds, all.best()->time.seconds);

  std::vector<int64_t> peaks;
  for (const Tried& tried : all.ranked) peaks.push_back(tried.peak_bytes);
  std::ranges::sort(peaks);
  config.run.memory_limit_bytes = peaks[peaks.size() / 4];
  const LayoutSearch some = search_layouts(config, 4, machine(), patient());
  EXPECT_TRUE(std::ranges::is_partitioned(some.ranked, &Tried::fits)) << "what does not fit is behind what does";
  EXPECT_FALSE(some.ranked.back().fits);

  config.run.memory_limit_bytes = 4096;
  const LayoutSearch none = search_layouts(config, 2, machine(), patient());
  EXPECT_EQ(none.best(), nullptr);
  EXPECT_THAT(to_string(none), HasSubstr("none fits"));
}

TEST_F(SearchTest, PutsTheOptimizerOnTheHostWhereNothingElseFits) {
  Config config = small();
  const auto least_of = [&](bool on_the_host) {
    int64_t least = INT64_MAX;
    for (LayoutChoice& choice : all_choices(config, 1, machine(), {16})) {
      choice.host_optimizer = on_the_host;
      least = std::min(least, total_of(largest_class(dry_run(with_settings(config, settings_of(choice, 1)), 1)).peak_bytes));
    }
    return least;
  };
  const int64_t least = least_of(false);
  config.run.memory_limit_bytes = least;
  const LayoutSearch on_device = search_layouts(config, 1, machine(), patient());
  ASSERT_NE(on_device.best(), nullptr);
  EXPECT_FALSE(on_device.best()->choice.host_optimizer);
  config.run.memory_limit_bytes = least - 1;
  const LayoutSearch on_host = search_layouts(config, 1, machine(), patient());
  ASSERT_NE(on_host.best(), nullptr);
  EXPECT_TRUE(on_host.best()->choice.host_optimizer);
  EXPECT_THAT(settings_of(on_host.best()->choice, 1), Contains("offload.optimizer=host"));
  EXPECT_THAT(to_string(on_host), HasSubstr("optimizer on the host"));
  EXPECT_THAT(on_host.losing, Contains(AllOf(Field(&Loses::what, "optimizer on the device"), Field(&Loses::reason, HasSubstr("needs")))));
  EXPECT_EQ(on_host.possible, on_device.possible);
  config.run.memory_limit_bytes = least_of(true);
  EXPECT_NE(search_layouts(config, 1, machine(), patient()).best(), nullptr) << "one rank has one mesh, of which the most promising ones do not fit";
}

TEST_F(SearchTest, ChoosesTheBatchWhereItMay) {
  const Config config = small();
  SearchOptions options = patient();
  options.batches = {8, 16, 32};
  const LayoutSearch found = search_layouts(config, 2, machine(), options);
  ASSERT_NE(found.best(), nullptr);
  std::set<int64_t> batches;
  for (const Tried& tried : found.ranked) batches.insert(tried.choice.batch);
  EXPECT_THAT(batches, SizeIs(testing::Ge(2)));
}

TEST_F(SearchTest, SaysWhereNothingCanBeDealt) {
  const LayoutSearch none = search_layouts(small(), 17, machine(), patient());
  EXPECT_EQ(none.possible, 0);
  EXPECT_THAT(to_string(none), HasSubstr("each data rank needs a sequence of its own"));
}

/// No layout changes what the device multiplies.
TEST_F(SearchTest, ATypeWithoutARateIsRefusedAtOnce) {
  const Machine cpu = machine_of(find_device("cpu"));
  EXPECT_THAT(refusal([&] { search_layouts(small({"precision.compute=fp8"}), 2, cpu, patient()); }), HasSubstr("the step multiplies in fp8"));
}

TEST_F(SearchTest, AModelWithoutHeadsIsDealtOverDataRanks) {
  Config mlp = config("mlp", {"run.steps=3", "batch.global_size=16"});
  mlp.run.memory_limit_bytes = int64_t{1} << 40;
  const LayoutSearch found = search_layouts(mlp, 2, machine(), patient());
  ASSERT_NE(found.best(), nullptr);
  EXPECT_THAT(found.ranked, Contains(Field(&Tried::choice, testing::Truly([](const LayoutChoice& choice) { return choice.data_ranks(2) == 2; }))));
}

TEST_F(SearchTest, CountsInWords) {
  EXPECT_THAT(plan::to_string(plan::LayoutSearch{.world = 1, .possible = 1}), HasSubstr("1 layout of 1 rank, "));
  EXPECT_THAT(plan::to_string(plan::LayoutSearch{.world = 2, .possible = 9}), HasSubstr("9 layouts of 2 ranks, "));
}

TEST_F(SearchTest, NeedsALimit) {
  Config config = small();
  config.run.memory_limit_bytes = 0;
  EXPECT_THAT(refusal([&] { search_layouts(config, 2, machine()); }), HasSubstr("run.memory_limit_bytes is not set"));
}

/// What stands for the stages between the ends of a pipeline is one of them.
TEST_F(SearchTest, AlikeStagesTakeTheSameTime) {
  for (const std::string schedule : {"1f1b", "interleaved"}) {
    const Config config = small(
        {"model.layers=16", "mesh.pp=4", "pipeline.schedule=" + schedule, schedule == "1f1b" ? "pipeline.virtual_stages=1" : "pipeline.virtual_stages=2"});
    const DryRun all = dry_run(with_settings(config, {"model.layers=16"}), 4, {.machine = machine()});
    const DryRun some = dry_run(with_settings(config, {"model.layers=16"}), 4, {.machine = machine(), .alike_stages = true});
    EXPECT_NEAR(some.time->seconds, all.time->seconds, 1e-3 * all.time->seconds);
    EXPECT_EQ(total_of(largest_class(some).peak_bytes), total_of(largest_class(all).peak_bytes));
    ASSERT_EQ(some.ranks.size(), all.ranks.size());
    for (size_t i = 0; i < all.ranks.size(); ++i) {
      EXPECT_EQ(some.ranks[i].pipeline_rank, all.ranks[i].pipeline_rank);
      EXPECT_EQ(some.ranks[i].count, all.ranks[i].count);
      EXPECT_GE(total_of(some.ranks[i].peak_bytes), total_of(all.ranks[i].peak_bytes) * 99 / 100);
    }
  }
}

/// Of those the one that keeps most micro-batches alive: where the second holds early stages and the first late ones, that is the second.
TEST_F(SearchTest, OfAlikeStagesTheOneThatKeepsMostStandsForAll) {
  using schedules::Kind;
  constexpr int micro_batches = 6, stages = 8;
  schedules::Schedule made{.name = "made", .micro_batches = micro_batches, .rank_of = {0, 2, 2, 3, 0, 1, 1, 3}, .actions = {}};
  made.actions.resize(4);
  std::vector<int> forwards(stages), backwards(stages);  // done of each stage
  while (backwards[0] < micro_batches) {
    for (int stage = stages; stage-- > 0;) {  // backwards first, late stages first
      const auto s = static_cast<size_t>(stage);
      auto& actions = made.actions[static_cast<size_t>(made.rank_of[s])];
      if (backwards[s] < (stage + 1 == stages ? forwards[s] : backwards[s + 1])) {
        actions.push_back({.kind = Kind::Backward, .stage = stage, .micro_batch = backwards[s]++});
      } else if (forwards[s] < (stage == 0 ? micro_batches : forwards[s - 1])) {
        actions.push_back({.kind = Kind::Forward, .stage = stage, .micro_batch = forwards[s]++});
      }
    }
  }
  std::ofstream(folder_ / "made.csv") << schedules::to_csv(made);
  const Config config = with_settings(small(), {"model.layers=14", "mesh.pp=4", "batch.global_size=6", "batch.micro_size=1", "pipeline.virtual_stages=2",
                                                "pipeline.schedule=" + (folder_ / "made.csv").string()});
  const DryRun all = dry_run(config, 4), some = dry_run(config, 4, {.alike_stages = true});
  const auto peak = [](const DryRun& run, size_t rank) { return total_of(run.ranks.at(rank).peak_bytes); };
  EXPECT_GT(peak(all, 2), peak(all, 1) * 5 / 4) << "then any would do";
  EXPECT_EQ(peak(some, 1), peak(all, 2));
  EXPECT_EQ(peak(some, 2), peak(all, 2));
  EXPECT_EQ(total_of(largest_class(some).peak_bytes), total_of(largest_class(all).peak_bytes));
}

/// Of a large model the first dry run alone may take longer than anybody waits.
TEST_F(SearchTest, BreaksOffADryRunThatLastsTooLong) {
  const LayoutSearch found = search_layouts(small(), 2, machine(), {.patience = std::chrono::seconds(0)});
  EXPECT_FALSE(found.complete);
  EXPECT_THAT(found.ranked, IsEmpty());
  EXPECT_THAT(to_string(found), HasSubstr("(--patience)"));
}

}  // namespace
}  // namespace tessera::plan
