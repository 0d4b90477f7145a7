// Every schedule, for every p in 1..8, m in 1..16 and v in 1..4 of its domain: what it does is complete and in order, no rank waits in a circle, and
// activations and bubbles are what the papers say.

#include <gtest/gtest.h>

#include "tessera/core/error.h"
#include "tessera/pipeline/schedules/check.h"
#include "tessera/pipeline/schedules/csv.h"
#include "tessera/pipeline/schedules/lower.h"
#include "tests/pipeline/schedules.h"

namespace tessera::schedules {
namespace {

using testing_support::for_each_schedule;
using testing_support::request_of;

std::string problem_of(const Schedule& schedule, Messages messages = Messages::Posted) {
  const auto problem = find_problem(schedule, messages);
  return problem ? problem->what : "";
}

std::string title(const Schedule& schedule, int micro_batches, int chunks) {
  return schedule.name + ", p = " + std::to_string(schedule.ranks()) + ", m = " + std::to_string(micro_batches) + ", v = " + std::to_string(chunks);
}

TEST(ScheduleProof, EachActionOnceInOrderWithoutDeadlock) {
  int schedules = 0;
  for_each_schedule([&](const Schedule& schedule, int ranks, int micro_batches, int chunks) {
    EXPECT_EQ(problem_of(schedule), "") << title(schedule, micro_batches, chunks);
    EXPECT_EQ(schedule.ranks(), ranks);
    EXPECT_EQ(schedule.micro_batches, micro_batches);
    EXPECT_EQ(schedule.stages(), ranks * chunks);
    ++schedules;
  });
  EXPECT_EQ(schedules, 2987);
}

TEST(ScheduleProof, MessagesMeetOnEveryKindOfEngine) {
  for_each_schedule([&](const Schedule& schedule, int, int micro_batches, int chunks) {
    if (micro_batches % 3 != 1) return;
    const auto waiting = lower(schedule, {.ahead = 0});
    ASSERT_EQ(problem_of(waiting, Messages::Rendezvous), "") << title(schedule, micro_batches, chunks);
    EXPECT_EQ(problem_of(waiting, Messages::Posted), "") << title(schedule, micro_batches, chunks);
    const auto ahead = lower(schedule, {.ahead = 2, .reduce_gradients = true, .unsharded_stages = 2});
    EXPECT_EQ(problem_of(ahead), "") << title(schedule, micro_batches, chunks);
  });
}

TEST(ScheduleProof, TextReadsBackAsWritten) {
  for_each_schedule([&](Schedule schedule, int, int micro_batches, int chunks) {
    if (micro_batches % 5 != 1) return;
    const auto lowered = lower(schedule, {.reduce_gradients = true, .unsharded_stages = 1});
    EXPECT_TRUE(read_csv(to_csv(schedule), schedule.name) == schedule) << title(schedule, micro_batches, chunks);
    EXPECT_TRUE(read_csv(to_csv(lowered), schedule.name) == lowered) << title(schedule, micro_batches, chunks);
  });
}

/// The most chunks that rank i may hold, which many schedules reach.
int most_chunks(const std::string& name, int p, int m, int v, int i) {
  const int group = m / std::max(1, m / p);
  if (name == "naive") return v;
  if (name == "gpipe") return m;
  if (name == "1f1b" || name == "pipedream" || name == "pipedream_2bw") return std::min(m, p - i);
  if (name == "interleaved") return std::min(v * m, 2 * (p - 1 - i) + (v - 1) * group + 1);
  if (name == "breadth_first") return v * m;
  if (name == "zb_h2") return 2 * p - 1;
  if (name == "zb_v") return 2 * p;
  if (name == "dualpipev") return 2 * p + 1;
  if (name == "v_half") return (p + 2) / 2 * 2;
  if (name == "v_min") return (p + 4) / 3 * 2;
  if (name == "zb_2p") return 2 * p;
  if (name == "zb_auto") return 3;
  return p;  // zb_h1, zb_1p
}

bool reaches_its_peak(const std::string& name) {
  return name == "naive" || name == "gpipe" || name == "1f1b" || name.starts_with("pipedream") || name == "interleaved" || name == "breadth_first";
}

TEST(ScheduleProof, ActivationsAreThoseOfThePapers) {
  for_each_schedule([&](const Schedule& schedule, int p, int m, int v) {
    const auto peaks = measure(schedule, simulate(schedule)).peak_activations;
    for (int i = 0; i < p; ++i) {
      const int held = most_alive(schedule, i), most = most_chunks(schedule.name, p, m, v, i);
      EXPECT_LE(held, most) << title(schedule, m, v) << ", rank " << i;
      if (reaches_its_peak(schedule.name)) EXPECT_EQ(held, most) << title(schedule, m, v) << ", rank " << i;
      EXPECT_DOUBLE_EQ(peaks[i], static_cast<double>(held) / v);
    }
  });
  EXPECT_EQ(most_alive(make_schedule(request_of("zb_h2", 4, 16)), 0), 7);
  EXPECT_EQ(most_alive(make_schedule(request_of("zb_v", 4, 16)), 2), 8);
  EXPECT_EQ(most_alive(make_schedule(request_of("dualpipev", 4, 16)), 1), 9);
}

TEST(ScheduleProof, BubblesAreThoseOfThePapers) {
  for_each_schedule([&](const Schedule& schedule, int p, int m, int v) {
    const auto measures = measure(schedule, simulate(schedule));
    const auto& name = schedule.name;
    double idle = -1, work = 3.0 * m;  // in units of F = B = W, of a rank
    if (name == "naive") idle = 3.0 * v * m * (p - 1), work = 3.0 * v * m;
    if (name == "gpipe" || name == "1f1b" || name == "pipedream" || name == "pipedream_2bw") idle = 3.0 * (p - 1);
    if ((name == "interleaved" && m % p == 0) || (name == "breadth_first" && m >= p)) idle = 3.0 * (p - 1), work = 3.0 * v * m;
    if (name == "zb_h1" && m >= p) idle = p - 1;
    if (name == "zb_h2" && m >= 2 * p - 1) idle = p - 1;
    if (name == "zb_v" && m >= 2 * p - 1) idle = p - 1, work = 6.0 * m;
    if (name == "dualpipev") idle = 2.0 * (p - 1), work = 6.0 * m;
    if (idle < 0) return;
    EXPECT_NEAR(measures.makespan, work + idle, 1e-9) << title(schedule, m, v);
    EXPECT_NEAR(measures.bubble_fraction, idle / (work + idle), 1e-12) << title(schedule, m, v);
    EXPECT_NEAR(measures.bubble_over_ideal, idle / work, 1e-12) << title(schedule, m, v);
    const bool no_bubble_inside = name == "zb_h2" || name == "zb_v";
    if (no_bubble_inside) EXPECT_NEAR(measures.span_bubble_rate, 0, 1e-12) << title(schedule, m, v);
  });
}

TEST(ScheduleProof, DomainsAreKept) {
  for (const auto& name : schedule_names()) {
    for (int ranks = 1; ranks <= 8; ++ranks) {
      for (int micro_batches = 1; micro_batches <= 16; ++micro_batches) {
        for (int chunks = 1; chunks <= 4; ++chunks) {
          if (!testing_support::takes(name, ranks, micro_batches, chunks))
            EXPECT_THROW(make_schedule(request_of(name, ranks, micro_batches, chunks)), ConfigError) << name << ranks << micro_batches << chunks;
        }
      }
    }
  }
}

}  // namespace
}  // namespace tessera::schedules
