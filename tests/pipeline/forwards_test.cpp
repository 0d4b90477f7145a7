#include "tessera/pipeline/schedules/forwards.h"

#include <algorithm>
#include <map>

#include <gtest/gtest.h>

namespace tessera::schedules {
namespace {

struct Course {
  int makespan = 0;   ///< in forwards
  int most_open = 0;  ///< micro-batches that have entered and not left, at most
};

/// Each rank in the order of its list, each action as soon as its input is there: an account of its own.
Course course_of(const Schedule& schedule) {
  std::map<std::pair<int, int>, int> end;  // of a stage's micro-batch
  std::vector<size_t> next(static_cast<size_t>(schedule.ranks()), 0);
  std::vector<int> free(static_cast<size_t>(schedule.ranks()), 0);
  for (bool moved = true; moved;) {
    moved = false;
    for (size_t rank = 0; rank < next.size(); ++rank) {
      const RankActions& actions = schedule.actions[rank];
      while (next[rank] < actions.size()) {
        const Action& action = actions[next[rank]];
        const auto input = end.find({action.stage - 1, action.micro_batch});
        if (action.stage > 0 && input == end.end()) break;
        free[rank] = std::max(free[rank], action.stage > 0 ? input->second : 0) + 1;
        EXPECT_TRUE(end.emplace(std::pair(action.stage, action.micro_batch), free[rank]).second) << "twice";
        EXPECT_EQ(schedule.rank_of[static_cast<size_t>(action.stage)], static_cast<int>(rank));
        ++next[rank];
        moved = true;
      }
    }
  }
  EXPECT_EQ(end.size(), static_cast<size_t>(schedule.stages() * schedule.micro_batches)) << "a deadlock, or something left out";
  Course course;
  for (const auto& [action, at] : end) course.makespan = std::max(course.makespan, at);
  for (int time = 0; time < course.makespan; ++time) {
    int open = 0;
    for (int i = 0; i < schedule.micro_batches; ++i) open += end.at({0, i}) <= time && end.at({schedule.stages() - 1, i}) > time;
    course.most_open = std::max(course.most_open, open);
  }
  return course;
}

TEST(Forwards, GoThroughEveryStageOnceAndNoRankIdlesInBetween) {
  for (int ranks = 1; ranks <= 5; ++ranks) {
    for (int chunks = 1; chunks <= 3; ++chunks) {
      for (int micro_batches = 1; micro_batches <= 10; ++micro_batches) {
        SCOPED_TRACE(std::to_string(ranks) + " ranks, " + std::to_string(chunks) + " chunks, " + std::to_string(micro_batches) + " micro-batches");
        const Course loop = course_of(forwards(loop_placement(ranks, chunks), ranks, micro_batches));
        if (chunks == 1 || micro_batches % ranks == 0) EXPECT_EQ(loop.makespan, chunks * micro_batches + ranks - 1);
        EXPECT_LE(loop.most_open, ranks) << "micro-batches leave before others enter";
        const Course v = course_of(forwards(v_placement(ranks, chunks), ranks, micro_batches));
        EXPECT_LE(v.makespan, chunks * micro_batches + chunks * (ranks - 1) + chunks);
      }
    }
  }
}

}  // namespace
}  // namespace tessera::schedules
