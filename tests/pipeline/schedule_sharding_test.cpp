// How long sharded parameters stay gathered, as a property of lists: each use finds its stage gathered, as often as the table of sharding.h says.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tessera/pipeline/schedules/check.h"
#include "tessera/pipeline/schedules/sharding.h"
#include "tests/pipeline/schedules.h"

namespace tessera::schedules {
namespace {

using testing_support::for_each_schedule;
using testing_support::request_of;

std::string list_of(const Schedule& schedule, int rank) {
  std::string text;
  for (const Action& action : schedule.actions[static_cast<size_t>(rank)]) text += (text.empty() ? "" : " ") + to_string(action);
  return text;
}

int gathers_of(const Schedule& schedule, int stage) {
  int count = 0;
  for (const RankActions& actions : schedule.actions) {
    count += static_cast<int>(std::ranges::count_if(actions, [&](const Action& action) { return action.kind == Kind::Unshard && action.stage == stage; }));
  }
  return count;
}

TEST(ScheduleSharding, AStepGathersEachStageOnce) {
  for_each_schedule([](const Schedule& schedule, int, int, int) {
    if (schedule.is_asynchronous()) return;
    const Schedule sharded = with_gathers(schedule, Gathered::Step);
    ASSERT_NO_THROW(check(sharded)) << schedule.name;
    for (int stage = 0; stage < schedule.stages(); ++stage) ASSERT_EQ(gathers_of(sharded, stage), 1) << schedule.name;
  });
}

/// Once for all forwards and once for all backwards, but for a stage whose backwards follow its forwards.
TEST(ScheduleSharding, RowsOfABreadthFirstStepGatherTwiceAndOfItsTurnOnce) {
  for (const int ranks : {1, 2, 3}) {
    for (const int chunks : {2, 3, 4}) {
      const Schedule schedule = make_schedule(request_of("breadth_first", ranks, 4, chunks));
      ASSERT_EQ(gathered_while_reshards(schedule), Gathered::Row);
      const Schedule sharded = with_gathers(schedule, Gathered::Row);
      EXPECT_NO_THROW(check(sharded));
      for (int stage = 0; stage < schedule.stages(); ++stage) EXPECT_EQ(gathers_of(sharded, stage), stage / ranks == chunks - 1 ? 1 : 2) << stage;
    }
  }
}

TEST(ScheduleSharding, RowsAreOfBreadthFirstAlone) {
  for (const char* name : {"gpipe", "1f1b", "zb_h1"}) EXPECT_EQ(gathered_while_reshards(make_schedule(request_of(name, 2, 4, 1))), Gathered::Pass) << name;
  for (const char* name : {"interleaved", "zb_v", "dualpipev"})
    EXPECT_EQ(gathered_while_reshards(make_schedule(request_of(name, 2, 8, 2))), Gathered::Pass) << name;
}

TEST(ScheduleSharding, ListsSayWhenAStageIsLetGo) {
  const Schedule schedule = make_schedule(request_of("breadth_first", 2, 2, 2));
  EXPECT_EQ(list_of(with_gathers(schedule, Gathered::Row), 0), "0UNSHARD 0F0 0F1 0RESHARD 2UNSHARD 2F0 2F1 2B0 2B1 2RESHARD 0UNSHARD 0B0 0B1 0RESHARD");
  EXPECT_EQ(list_of(with_gathers(schedule, Gathered::Step), 0), "0UNSHARD 0F0 0F1 2UNSHARD 2F0 2F1 2B0 2B1 2RESHARD 0B0 0B1 0RESHARD");
  EXPECT_EQ(with_gathers(schedule, Gathered::Pass), schedule);
  // Gradients of weights need no weights.
  EXPECT_EQ(list_of(with_gathers(make_schedule(request_of("zb_h1", 2, 2, 1)), Gathered::Step), 1), "1UNSHARD 1F0 1I0 1F1 1I1 1RESHARD 1W0 1W1");
}

TEST(ScheduleSharding, AListThatSaysItselfStaysAsItIs) {
  const Schedule own = with_gathers(make_schedule(request_of("breadth_first", 2, 2, 2)), Gathered::Row);
  EXPECT_EQ(with_gathers(own, Gathered::Step), own);
}

TEST(ScheduleSharding, AnActionKnowsWhatComesAndWhatStays) {
  const Schedule schedule = with_gathers(make_schedule(request_of("breadth_first", 2, 2, 2)), Gathered::Row);
  const Outlooks seen = outlooks(schedule.actions[0]);
  const auto after = [&](int stage, Kind kind, int micro_batch) {
    const Outlook& outlook = seen.at({stage, kind, micro_batch});
    return (outlook.coming ? to_string(*outlook.coming) : "nothing") + (outlook.stays ? ", stays" : "");
  };
  EXPECT_EQ(after(0, Kind::Forward, 0), "0F1, stays");
  EXPECT_EQ(after(0, Kind::Forward, 1), "2F0");
  EXPECT_EQ(after(2, Kind::Forward, 1), "2B0, stays");
  EXPECT_EQ(after(2, Kind::Backward, 1), "0B0");
  EXPECT_EQ(after(0, Kind::Backward, 1), "nothing");
  // Without Unshard units come and go with each action.
  const Schedule late = make_schedule(request_of("zb_h1", 2, 2, 1));
  for (const auto& [action, outlook] : outlooks(late.actions[1])) EXPECT_FALSE(outlook.stays);
  EXPECT_EQ(outlooks(late.actions[1]).at({1, Kind::BackwardInput, 0}).coming->kind, Kind::Forward);
}

}  // namespace
}  // namespace tessera::schedules
