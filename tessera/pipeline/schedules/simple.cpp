// Naive model parallelism, GPipe and 1F1B. Micro-batches pass every stage in their order, forward and backward, so that a rank's list is told by one number:
// how many forwards run ahead of its backwards.

#include <algorithm>

#include "tessera/core/error.h"
#include "tessera/pipeline/schedules/generators.h"

namespace tessera::schedules {
namespace {

using enum Kind;

Schedule ahead_by(const char* name, int ranks, int micro_batches, auto&& ahead) {
  require(ranks >= 1 && micro_batches >= 1, name, ": stages = ", ranks, ", micro-batches = ", micro_batches, ": at least one of each is needed");
  Schedule schedule{.name = name, .micro_batches = micro_batches, .rank_of = loop_placement(ranks, 1), .actions = {}};
  for (int rank = 0; rank < ranks; ++rank) {
    RankActions actions;
    int forwards = 0;
    for (int backward = 0; backward < micro_batches; ++backward) {
      for (; forwards < std::min(backward + ahead(rank) + 1, micro_batches); ++forwards)
        actions.push_back({.kind = Forward, .stage = rank, .micro_batch = forwards});
      actions.push_back({.kind = Backward, .stage = rank, .micro_batch = backward});
    }
    schedule.actions.push_back(actions);
  }
  return schedule;
}

}  // namespace

Schedule naive(int ranks, int micro_batches, int chunks) {
  require(ranks >= 1 && micro_batches >= 1 && chunks >= 1, "naive: stages = ", ranks, ", micro-batches = ", micro_batches, ", chunks = ", chunks,
          ": at least one of each is needed");
  Schedule schedule{.name = "naive", .micro_batches = micro_batches, .rank_of = loop_placement(ranks, chunks), .actions = {}};
  schedule.actions.resize(ranks);
  for (int micro_batch = 0; micro_batch < micro_batches; ++micro_batch) {
    for (int stage = 0; stage < schedule.stages(); ++stage)
      schedule.actions[schedule.rank_of[stage]].push_back({.kind = Forward, .stage = stage, .micro_batch = micro_batch});
    for (int stage = schedule.stages() - 1; stage >= 0; --stage)
      schedule.actions[schedule.rank_of[stage]].push_back({.kind = Backward, .stage = stage, .micro_batch = micro_batch});
  }
  return schedule;
}

Schedule gpipe(int ranks, int micro_batches) {
  return ahead_by("gpipe", ranks, micro_batches, [&](int) { return micro_batches - 1; });
}

Schedule one_f_one_b(int ranks, int micro_batches) {
  return ahead_by("1f1b", ranks, micro_batches, [&](int rank) { return ranks - 1 - rank; });
}

}  // namespace tessera::schedules
