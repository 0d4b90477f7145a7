// Lists as the papers draw them, for sizes that fit on a line, and what generators refuse.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tessera/config/schedule_kinds.h"
#include "tessera/core/error.h"
#include "tessera/pipeline/schedules/check.h"
#include "tessera/pipeline/schedules/csv.h"
#include "tessera/pipeline/schedules/generators.h"
#include "tessera/pipeline/schedules/lower.h"
#include "tests/pipeline/schedules.h"
#include "tests/refusal.h"

namespace tessera::schedules {
namespace {

using testing_support::refusal;
using testing_support::request_of;

TEST(ScheduleLists, AreAsThePapersDrawThem) {
  EXPECT_EQ(to_string(naive(2, 2)), "rank 0: 0F0 0B0 0F1 0B1\nrank 1: 1F0 1B0 1F1 1B1\n");
  EXPECT_EQ(to_string(gpipe(2, 3)), "rank 0: 0F0 0F1 0F2 0B0 0B1 0B2\nrank 1: 1F0 1F1 1F2 1B0 1B1 1B2\n");
  EXPECT_EQ(to_string(one_f_one_b(3, 4)),
            "rank 0: 0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3\nrank 1: 1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3\nrank 2: 2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3\n");
  EXPECT_EQ(to_string(one_f_one_b(3, 1)), "rank 0: 0F0 0B0\nrank 1: 1F0 1B0\nrank 2: 2F0 2B0\n");
  EXPECT_EQ(to_string(interleaved(2, 2, 2)), "rank 0: 0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1\nrank 1: 1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1\n");
  EXPECT_EQ(to_string(breadth_first(2, 2, 2)), "rank 0: 0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1\nrank 1: 1F0 1F1 3F0 3F1 3B0 3B1 1B0 1B1\n");
  EXPECT_EQ(to_string(zb_h1(2, 3)), "rank 0: 0F0 0F1 0I0 0W0 0F2 0I1 0W1 0I2 0W2\nrank 1: 1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1W2\n");
  EXPECT_EQ(to_string(zb_v(1, 2)), "rank 0: 0F0 1F0 1I0 1W0 0F1 0I0 0W0 1F1 1I1 1W1 0I1 0W1\n");
  EXPECT_EQ(to_string(dualpipev(1, 2)), "rank 0: 0F0 1F0 0F1 1B0 (1F1;0B0)OVERLAP_F_B 1B1 0I1 0W1\n");
}

TEST(ScheduleLists, MegatronsGroupsMayEndWithASmallerOne) {
  EXPECT_EQ(to_string(interleaved(2, 5, 2, 3)), to_string(interleaved(2, 5, 2, 3)));
  const auto schedule = interleaved(2, 5, 2, 3);
  EXPECT_EQ(to_string(RankActions(schedule.actions[0].begin(), schedule.actions[0].begin() + 5).back()), "2F1");
  EXPECT_EQ(interleaved(2, 8, 2, 2).actions, interleaved(2, 8, 2).actions);
  EXPECT_EQ(
      refusal([] { interleaved(4, 9, 2, 4); }),
      "interleaved: micro_batches = 9 in groups of 4: the last group holds 1, and must be full or hold at least 4, one for each stage; the next that does: 12");
  EXPECT_EQ(refusal([] { interleaved(4, 9, 2, 3); }), "interleaved: group = 3 over 4 stages: must be at least 4");
}

TEST(ScheduleLists, StagesLieInALoopOrDownAndUp) {
  EXPECT_EQ(loop_placement(3, 2), (std::vector{0, 1, 2, 0, 1, 2}));
  EXPECT_EQ(v_placement(3, 3), (std::vector{0, 1, 2, 2, 1, 0, 0, 1, 2}));
  const auto schedule = zb_v(3, 4);
  EXPECT_EQ(schedule.stages_of(1), (std::vector{1, 4}));
  EXPECT_TRUE(schedule.same_rank(2, 3));
  EXPECT_FALSE(schedule.is_lowered());
  EXPECT_TRUE(schedule.splits_backward());
  EXPECT_FALSE(schedule.is_asynchronous());
}

TEST(ScheduleLists, WeightGradientsMayWait) {
  const auto text = [](WeightGradients when) { return to_string(with_weight_gradients(one_f_one_b(1, 2), when)); };
  EXPECT_EQ(text(WeightGradients::InBackward), "rank 0: 0F0 0B0 0F1 0B1\n");
  EXPECT_EQ(text(WeightGradients::BehindBackward), "rank 0: 0F0 0I0 0W0 0F1 0I1 0W1\n");
  EXPECT_EQ(text(WeightGradients::AtTheEnd), "rank 0: 0F0 0I0 0F1 0I1 0W0 0W1\n");
}

TEST(ScheduleLists, BackwardsOfAStageAreCutAlike) {
  const auto alike = [](const char* text) { return to_string(with_backwards_alike(read_csv(text, "mine.csv"))); };
  EXPECT_EQ(alike("0F0,0I0,0W0,0F1,(0F2;0B1)OVERLAP_F_B,0B2\n"), "rank 0: 0F0 0I0 0W0 0F1 0F2 0I1 0W1 0I2 0W2\n");
  EXPECT_EQ(alike("0F0,0F1,0B0,0I1,0W1\n"), "rank 0: 0F0 0F1 0I0 0W0 0I1 0W1\n");
  EXPECT_EQ(alike("0F0,1F0,1I0,0B0,1W0\n"), "rank 0: 0F0 1F0 1I0 0B0 1W0\n") << "each stage by itself";
}

TEST(ScheduleLists, WhatADomainLacksIsRefusedWithTheWayOut) {
  const auto refused = [](Request request) { return refusal([&] { make_schedule(request); }); };
  EXPECT_EQ(refused({.name = "interleaved", .ranks = 4, .micro_batches = 9, .chunks = 2}),
            "interleaved: micro_batches = 9 over 4 stages: must be a multiple of max(1, micro_batches / 4) = 2; the next that is: 10");
  EXPECT_EQ(refused(request_of("dualpipev", 4, 7)), "dualpipev: micro_batches = 7 over 4 stages: must be at least twice as many; the next that are: 8");
  EXPECT_EQ(refused(request_of("zb_v", 4, 8, 3)), "zb_v: virtual_stages = 3: a rank holds two stages of it; take 2");
  EXPECT_EQ(refused(request_of("gpipe", 4, 8, 2)),
            "gpipe: virtual_stages = 2: a rank holds one stage of it; take 1, or a schedule with any number: naive, interleaved, breadth_first");
  EXPECT_EQ(refused(request_of("1f1b", 0, 8)), "1f1b: stages = 0: at least 1");
  EXPECT_EQ(refused(request_of("1f1b", 2, 0)), "1f1b: micro_batches = 0: at least 1");
  EXPECT_EQ(refused({.name = "gpipe", .ranks = 2, .micro_batches = 2, .memory_limit = 3}), "gpipe: memory_limit is known to zb_auto only; leave it out");
  EXPECT_THAT(refused({.name = "zb_2p", .ranks = 2, .micro_batches = 2, .kept = 0}), testing::StartsWith("zb_2p: kept = 0: "));
  EXPECT_THAT(refused({.name = "zb_1p", .ranks = 2, .micro_batches = 2, .costs = {.stages = std::vector<StageCosts>(3)}}),
              testing::StartsWith("zb_1p: costs of 3 stages for 2 ranks"));
  EXPECT_EQ(refused({.name = "gpipe", .ranks = 2, .micro_batches = 2, .kept = 0.5}), "gpipe: kept is known to zb_1p, zb_2p and zb_auto only; leave it out");
  EXPECT_EQ(refused({.name = "zb_auto", .ranks = 2, .micro_batches = 2}), "zb_auto: memory_limit = 0: a rank holds at least one micro-batch; take 1 or more");
  EXPECT_EQ(
      refusal([] { pipedream_2bw(4, 8, 3); }),
      "pipedream_2bw: per_update = 3: two versions of the weights are enough where an update sums at least as many micro-batches as there are stages; take 4");
  EXPECT_THAT(refused(request_of("1fb1", 2, 2)), testing::StartsWith("1fb1: no such schedule; there are naive gpipe 1f1b "));
  EXPECT_THAT(refused(request_of("gpipe", 1 << 20, 1 << 20)), testing::HasSubstr("take fewer micro-batches"));
}

/// What rules between settings ask of names (config/schedule_kinds.h) is what the list makes of them.
TEST(ScheduleLists, KindsOfNamesAreThoseThatAreMade) {
  for (const auto& known : known_schedules()) {
    Request request = request_of(known.name, 2, 4);
    if (known.name == "zb_auto") request.memory_limit = 2;
    const Schedule made = make_schedule(request);
    EXPECT_EQ(made.is_asynchronous(), is_asynchronous(known.name)) << known.name;
    request.costs.stages.assign(made.rank_of.size(), {.forward = 3, .backward = 2, .backward_input = 1, .backward_weight = 1});
    request.kept = is_made_for_costs(known.name) ? 0.5 : 1;
    EXPECT_NO_THROW(make_schedule(request)) << known.name;
    request.kept = 0.5;
    if (!is_made_for_costs(known.name)) EXPECT_THAT(refusal([&] { make_schedule(request); }), testing::HasSubstr("kept is known to")) << known.name;
  }
}

TEST(ScheduleLists, ARefusalSaysWhichFieldOfTheRequestHasToChange) {
  const auto knob = [](const Request& request) {
    try {
      make_schedule(request);
    } catch (const RefusedRequest& refused) {
      return refused.knob();
    }
    return std::string("none");
  };
  EXPECT_EQ(knob({.name = "interleaved", .ranks = 4, .micro_batches = 9, .chunks = 2}), "micro_batches");
  EXPECT_EQ(knob(request_of("dualpipev", 4, 7)), "micro_batches");
  EXPECT_EQ(knob(request_of("zb_v", 4, 8, 3)), "chunks");
  EXPECT_EQ(knob({.name = "gpipe", .ranks = 2, .micro_batches = 2, .kept = 0.5}), "kept");
  EXPECT_EQ(knob({.name = "zb_auto", .ranks = 2, .micro_batches = 2}), "memory_limit");
  EXPECT_EQ(knob({.name = "pipedream_2bw", .ranks = 4, .micro_batches = 8, .per_update = 3}), "per_update");
  EXPECT_EQ(knob({.name = "gpipe", .ranks = 0, .micro_batches = 2}), "ranks");
}

TEST(ScheduleLists, MessagesStandWhereTheyHappen) {
  EXPECT_EQ(to_string(lower(one_f_one_b(2, 2), {.ahead = 0})),
            "rank 0: 0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1\nrank 1: 1RECV_F0 1F0 1RECV_F1 1B0 1SEND_B0 1F1 1B1 1SEND_B1\n");
  // A receive is begun before what its rank computes until the message is there.
  EXPECT_EQ(to_string(lower(one_f_one_b(2, 2), {.ahead = 1})),
            "rank 0: 0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0RECV_B1 0B0 0B1\nrank 1: 1RECV_F0 1RECV_F1 1F0 1B0 1SEND_B0 1F1 1B1 1SEND_B1\n");
  // The turn of a V stays on its rank.
  EXPECT_EQ(to_string(lower(zb_v(1, 1), {})), "rank 0: 0F0 1F0 1I0 1W0 0I0 0W0\n");
}

/// What the last stage's late update needs of the first stage, whose backward of the same micro-batch comes later, stands before what brings the last stage its
/// next micro-batch: where two versions of the weights are enough (PipeDream-2BW), and under vertical sync. Where stages disagree it cannot.
TEST(ScheduleLists, LateUpdatesOfTheLastStageWaitForNothing) {
  const auto waits = [](const Schedule& schedule) {
    const int last = schedule.stages() - 1;
    const auto& of_first = schedule.actions.front();
    const auto place = [&](Kind kind, int micro_batch) {
      return std::ranges::find_if(of_first, [&](const Action& action) { return action.kind == kind && action.micro_batch == micro_batch; }) - of_first.begin();
    };
    bool waits = false;
    int summed = -1;  // the last micro-batch of the newest update
    for (const Action& action : schedule.actions.back()) {
      if (action.stage != last) continue;
      if (action.kind == Kind::Update) summed = action.micro_batch;
      if (action.kind == Kind::Forward && summed >= 0) waits |= place(Kind::Forward, action.micro_batch) < place(Kind::Backward, summed);
    }
    return waits;
  };
  for (int p = 2; p <= 8; ++p) {
    for (int m = 1; m <= 16; ++m) {
      for (const Schedule& schedule : {pipedream(p, m, /*vertical_sync=*/true), pipedream_2bw(p, m), pipedream_2bw(p, m, p + 2)}) {
        const Schedule late = with_late_updates(schedule, p - 1);
        check(late);
        EXPECT_FALSE(waits(late)) << to_string(late);
        const auto versions = measure(late, simulate(late)).weight_versions;
        EXPECT_EQ(versions.back(), 1) << to_string(late);
      }
      if (m > 1) EXPECT_TRUE(waits(with_late_updates(pipedream(p, m), p - 1)));
    }
  }
  EXPECT_EQ(to_string(with_late_updates(pipedream_2bw(2, 5), 1)),
            "rank 0: 0F0 0F1 0B0 0F2 0B1 0UPDATE1@1 0F3 0B2 0F4@1 0B3 0UPDATE3@2 0B4@1 0UPDATE4@3\n"
            "rank 1: 1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3 1UPDATE1@1 1F4@1 1B4@1 1UPDATE3@2 1UPDATE4@3\n");
}

TEST(ScheduleLists, ShardedStagesAreGatheredForTheirUse) {
  EXPECT_EQ(to_string(lower(breadth_first(1, 2, 2), {.reduce_gradients = true, .unsharded_stages = 1})),
            "rank 0: 0UNSHARD 0F0 0F1 0RESHARD 1UNSHARD 1F0 1F1 1B0 1B1 1REDUCE_GRAD 1RESHARD 0UNSHARD 0B0 0B1 0REDUCE_GRAD 0RESHARD\n");
  EXPECT_EQ(to_string(lower(pipedream(1, 2), {.reduce_gradients = true})), "rank 0: 0F0 0B0 0REDUCE_GRAD 0UPDATE0@1 0F1@1 0B1@1 0REDUCE_GRAD 0UPDATE1@2\n");
}

}  // namespace
}  // namespace tessera::schedules
