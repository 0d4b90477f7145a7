// Times of a schedule by hand, and the versions of weights that asynchronous ones hold.

#include <gtest/gtest.h>

#include "tessera/pipeline/schedules/generators.h"
#include "tessera/pipeline/schedules/picture.h"

namespace tessera::schedules {
namespace {

TEST(ScheduleSimulation, MessagesTakeTimeBetweenRanksOnly) {
  const Costs costs{.forward = 2, .backward_input = 3, .backward_weight = 1, .communication = 0.5};
  const auto timeline = simulate(one_f_one_b(2, 1), costs);
  EXPECT_EQ(timeline[1][0].start, 2.5);
  EXPECT_EQ(timeline[1][1].end, 8.5);
  EXPECT_EQ(timeline[0][1].start, 9);
  EXPECT_EQ(timeline[0][1].end, 13);
  const auto turn = simulate(zb_v(1, 1), costs);
  EXPECT_EQ(turn[0].back().end, 12);
}

/// An update holds up what its stage does next, and the neighbours that wait for that.
TEST(ScheduleSimulation, UpdatesInTheMidstTakeTime) {
  const StageCosts cost{.forward = 1, .backward = 2, .update = 0.5};
  const auto schedule = pipedream(1, 3);  // F0 B0 U0 F1 B1 U1 F2 B2 U2
  const auto timeline = simulate(schedule, {.stages = {cost}});
  const auto measures = measure(schedule, timeline);
  EXPECT_EQ(measures.makespan, 3 * 3.5);
  EXPECT_EQ(measures.bubble_fraction, 0) << "who updates is not idle";
  const auto two = pipedream(2, 3);
  EXPECT_EQ(measure(two, simulate(two, {.stages = {cost, cost}})).makespan, 1 + 3 * 3.5 + 2);
  EXPECT_EQ(grid_of(two, simulate(two, {.stages = {cost, cost}})).find("UPDATE0@1") != std::string::npos, true);
}

TEST(ScheduleSimulation, ARankMayBeSlower) {
  const auto schedule = gpipe(2, 3);
  const auto measures = measure(schedule, simulate(schedule, {.scale = {1, 2}}));
  EXPECT_EQ(measures.makespan, 1 + 3 * 2 + 3 * 4 + 2);
  EXPECT_NEAR(measures.bubble_fraction, 1 - (9.0 + 18) / (2 * 21), 1e-12);
}

// DeepSeek's formula is of the rank that idles most, and holds where forwards and backwards of inputs cost the same.
TEST(ScheduleSimulation, OverlapShortensDualPipeV) {
  for (const double overlap : {3.0, 2.5, 2.0}) {
    for (const int ranks : {1, 2, 4, 8}) {
      const Costs costs{.overlap = overlap};
      const auto schedule = dualpipev(ranks, 2 * ranks + 3);
      const auto timeline = simulate(schedule, costs);
      const double makespan = measure(schedule, timeline).makespan;
      double most_idle = 0;
      for (int rank = 0; rank < ranks; ++rank) {
        double busy = 0;
        for (const Span& span : timeline[rank]) busy += span.end - span.start;
        most_idle = std::max(most_idle, makespan - busy);
      }
      EXPECT_NEAR(most_idle, (ranks - 1) * (overlap + 2 - 3), 1e-9) << ranks << " ranks, F&B = " << overlap;
    }
  }
}

std::vector<int> versions_of(const Schedule& schedule) { return measure(schedule, simulate(schedule)).weight_versions; }

TEST(ScheduleSimulation, PipeDreamHoldsAVersionForEachMicroBatchInFlight) {
  EXPECT_EQ(versions_of(pipedream(4, 12)), (std::vector{4, 3, 2, 1}));
  EXPECT_EQ(versions_of(pipedream(4, 12, /*vertical_sync=*/true)), (std::vector{4, 4, 4, 4}));
  EXPECT_EQ(versions_of(pipedream_2bw(4, 12)), (std::vector{2, 2, 2, 2}));
  EXPECT_EQ(versions_of(pipedream_2bw(4, 4)), (std::vector{1, 1, 1, 1}));
  EXPECT_EQ(versions_of(one_f_one_b(4, 12)), (std::vector{1, 1, 1, 1}));
}

TEST(ScheduleSimulation, AMicroBatchUsesTheVersionThatItMeets) {
  EXPECT_EQ(to_string(pipedream(2, 3)),
            "rank 0: 0F0 0F1 0B0 0UPDATE0@1 0F2@1 0B1 0UPDATE1@2 0B2@1 0UPDATE2@3\n"
            "rank 1: 1F0 1B0 1UPDATE0@1 1F1@1 1B1@1 1UPDATE1@2 1F2@2 1B2@2 1UPDATE2@3\n");
  EXPECT_EQ(to_string(pipedream(2, 3, /*vertical_sync=*/true)),
            "rank 0: 0F0 0F1 0B0 0UPDATE0@1 0F2@1 0B1 0UPDATE1@2 0B2@1 0UPDATE2@3\n"
            "rank 1: 1F0 1B0 1UPDATE0@1 1F1 1B1 1UPDATE1@2 1F2@1 1B2@1 1UPDATE2@3\n");
  EXPECT_EQ(to_string(pipedream_2bw(1, 6, 2)), "rank 0: 0F0 0B0 0F1 0B1 0UPDATE1@1 0F2 0B2 0F3 0B3 0UPDATE3@2 0F4@1 0B4@1 0F5@1 0B5@1 0UPDATE5@3\n");
}

}  // namespace
}  // namespace tessera::schedules
