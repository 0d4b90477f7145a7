#include "tessera/pipeline/schedules/timed.h"

#include <gmock/gmock.h>
#include <nlohmann/json.hpp>

#include "tessera/core/error.h"
#include "tessera/pipeline/schedules/generators.h"
#include "tessera/pipeline/schedules/picture.h"
#include "tests/refusal.h"

namespace tessera::schedules {
namespace {

using nlohmann::json;
using ::testing::AllOf;
using ::testing::DoubleEq;
using ::testing::HasSubstr;

/// As if it had been measured where messages take `message`.
Timed as_measured(const Schedule& schedule, const Costs& costs) {
  Timed timed{.schedule = schedule, .timeline = simulate(schedule, costs)};
  for (const auto& spans : timed.timeline) {
    auto& asked = timed.asked.emplace_back();
    timed.collectives.emplace_back(spans.size(), 0.25);
    for (size_t i = 0; i < spans.size(); ++i) asked.push_back(i == 0 ? 0 : spans[i - 1].end);
  }
  timed.step = 7;
  return timed;
}

const std::vector<StageCosts> kUneven{{.forward = 2, .backward = 5, .backward_input = 3, .backward_weight = 2},
                                      {.forward = 1, .backward = 2, .backward_input = 1, .backward_weight = 1},
                                      {.forward = 4, .backward = 9, .backward_input = 5, .backward_weight = 4}};

TEST(Timed, IsReadAsItWasWritten) {
  for (const auto& schedule : {one_f_one_b(3, 4), zb_v(2, 3), interleaved(2, 4, 2)}) {
    Timed timed = as_measured(schedule, {.communication = 0.5});
    timed.rank = 2;
    const Timed read = timed_from_json(json::parse(to_json(timed).dump()), "here");
    EXPECT_EQ(read.schedule, timed.schedule);
    EXPECT_EQ(to_json(read), to_json(timed));
    const Timed foretold{.schedule = schedule, .timeline = timed.timeline};
    EXPECT_FALSE(timed_from_json(to_json(foretold), "here").measured());
  }
}

TEST(Timed, SpansThatAreEmptyAreNoCosts) {
  const Timed timed = as_measured(one_f_one_b(2, 3), {});
  EXPECT_EQ(measured_costs(timed).stages.size(), 2U);
  const auto without = [&](auto&& which) {
    Timed cut = timed;
    for (int rank = 0; rank < 2; ++rank) {
      for (size_t i = 0; i < cut.timeline[rank].size(); ++i) {
        if (which(cut.schedule.actions[rank][i])) cut.timeline[rank][i].end = cut.timeline[rank][i].start;
      }
    }
    return testing_support::refusal([&] { measured_costs(cut); });
  };
  EXPECT_THAT(without([](const Action&) { return true; }), testing::HasSubstr("the forwards of stage 0 have no span, or empty ones"));
  EXPECT_THAT(without([](const Action& action) { return action.stage == 1 && action.kind == Kind::Forward; }), testing::HasSubstr("the forwards of stage 1"));
  EXPECT_THAT(without([](const Action& action) { return action.kind != Kind::Forward; }), testing::HasSubstr("no backward has a span that is not empty"));
  Timed none = timed;
  for (auto& actions : none.schedule.actions) actions.clear();
  for (auto& spans : none.timeline) spans.clear();
  EXPECT_THAT(testing_support::refusal([&] { measured_costs(none); }), testing::HasSubstr("the forwards of stage 0"));
}

TEST(Timed, CostsOfStagesAreTheirMeans) {
  for (const auto& schedule : {one_f_one_b(3, 4), zb_h1(3, 4)}) {
    const Timed timed = as_measured(schedule, {.stages = kUneven});
    const auto costs = costs_of(timed);
    ASSERT_EQ(costs.size(), 3U);
    for (size_t stage = 0; stage < 3; ++stage) {
      EXPECT_THAT(costs[stage].forward, DoubleEq(kUneven[stage].forward));
      EXPECT_THAT(costs[stage].backward, DoubleEq(kUneven[stage].backward));  // of halves, their sum
      EXPECT_THAT(costs[stage].backward_input, DoubleEq(schedule.splits_backward() ? kUneven[stage].backward_input : kUneven[stage].backward / 2));
    }
    // So the measured is foretold again.
    EXPECT_THAT(measure(schedule, simulate(schedule, {.stages = costs})).makespan, DoubleEq(measure(schedule, timed.timeline).makespan));
  }
}

TEST(Timed, UpdatesAreCostsAndNoIdleTime) {
  auto stages = kUneven;
  for (StageCosts& cost : stages) cost.update = cost.forward / 2;
  const Timed timed = as_measured(pipedream(3, 4), {.stages = stages});
  const auto costs = costs_of(timed);
  for (size_t stage = 0; stage < 3; ++stage) EXPECT_THAT(costs[stage].update, DoubleEq(stages[stage].update));
  EXPECT_THAT(measure(timed.schedule, simulate(timed.schedule, {.stages = costs})).makespan, DoubleEq(measure(timed.schedule, timed.timeline).makespan));
  EXPECT_THAT(shares_of(timed)[0].busy, DoubleEq(4 * (2 + 5 + 1)));
}

TEST(Timed, MessagesTakeFromTheEndOfOneActionToTheStartOfTheNext) {
  EXPECT_THAT(message_time(as_measured(gpipe(3, 4), {.communication = 0.5})), DoubleEq(0.5));
  EXPECT_EQ(message_time(as_measured(gpipe(1, 4), {.communication = 0.5})), 0);
}

TEST(Timed, SharesOfARankAddUp) {
  const Timed timed = as_measured(one_f_one_b(2, 2), {});  // rank 0: F0 F1 - - B0 - B1; rank 1: - F0 B0 F1 B1
  const auto shares = shares_of(timed);
  EXPECT_EQ(shares[0].busy, 6);
  EXPECT_EQ(shares[0].waited, 3);
  EXPECT_EQ(shares[0].collectives, 4 * 0.25);
  EXPECT_THAT(shares[0].bubble, DoubleEq(3.0 / 9));
  EXPECT_EQ(shares[1].waited, 0);  // its wait for the first is none within its span
}

TEST(Timed, RefusesWhatIsNoTimeline) {
  const json good = to_json(as_measured(one_f_one_b(2, 2), {}));
  const auto refused = [&](const json& change) {
    json bad = good;
    bad.merge_patch(change);
    return testing_support::refusal([&] { timed_from_json(bad, "run/timeline.jsonl"); });
  };
  EXPECT_THAT(refused({{"name", nullptr}}), AllOf(HasSubstr("run/timeline.jsonl: is no timeline of a pipeline"), HasSubstr("name")));
  EXPECT_THAT(refused({{"actions", {{"0F0"}, {"1F0"}}}}), HasSubstr("missing"));
  EXPECT_THAT(refused({{"micro_batches", 1}}), HasSubstr("0F1 is of another schedule"));
  EXPECT_THAT(refused({{"micro_batches", 1'000'000'000}}), HasSubstr("no pipeline has"));
  EXPECT_THAT(refused({{"rank_of_stage", {0, 5}}}), HasSubstr("names rank 5 of 2"));
  EXPECT_THAT(refused({{"micro_batches", (int64_t{1} << 32) + 2}}), HasSubstr("micro_batches = 4294967298: expected a whole number from 0 to 2147483647"));
  EXPECT_THAT(refused({{"rank_of_stage", {int64_t{1} << 40, 1}}}), HasSubstr("rank_of_stage names rank 1099511627776 of 2"));
  EXPECT_THAT(refused({{"rank_of_stage", {0.5, 1}}}), HasSubstr("0.5 is not an integer of 64 bits"));
  EXPECT_THAT(refused({{"step", 2.7}}), HasSubstr("step = 2.7: expected a whole number"));
  EXPECT_THAT(refused({{"step", std::numeric_limits<uint64_t>::max()}}), HasSubstr("step = 18446744073709551615: expected a whole number"));
  EXPECT_THAT(refused({{"timeline", {{{0, 1}}, {{0, 1}}}}}), HasSubstr("1 spans for 4 actions"));
  EXPECT_THAT(refused({{"timeline", {{{0, 1}, {1, 2}, {3, 2}, {4, 5}}, {{0, 1}, {1, 2}, {3, 4}, {4, 5}}}}}), HasSubstr("goes back in time"));
  EXPECT_THAT(refused({{"asked", {{0, 0, 0, 0}}}}), HasSubstr("asked has another number of ranks"));
  EXPECT_THAT(refused({{"asked", {{0, 0, 0}, {0, 0, 0, 0}}}}), HasSubstr("3 entries for 4 actions"));
}

TEST(Timed, WaitsAreDrawnForPerfetto) {
  const Timed timed = as_measured(one_f_one_b(2, 2), {});
  const auto trace = json::parse(trace_of({{"measured", timed.schedule, timed.timeline, timed.asked}}, 1000));
  double waited = 0;
  for (const auto& event : trace.at("traceEvents")) waited += event.value("cat", "") == "wait" && event.at("tid") == 0 ? event.at("dur").get<double>() : 0;
  EXPECT_EQ(waited, 3000);
}

}  // namespace
}  // namespace tessera::schedules
