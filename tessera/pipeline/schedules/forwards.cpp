#include "tessera/pipeline/schedules/forwards.h"

#include "tessera/core/error.h"

// List scheduling: the clock moves by one forward, and in each turn a rank takes one of those whose input has been made in an earlier turn. The lists follow
// one order of time, so no rank waits for one that waits for it.

namespace tessera::schedules {

Schedule forwards(const std::vector<int>& rank_of, int ranks, int micro_batches) {
  Schedule schedule{.name = "forwards", .micro_batches = micro_batches, .rank_of = rank_of, .actions = {}};
  schedule.actions.resize(static_cast<size_t>(ranks));
  std::vector<int> done(rank_of.size(), 0);  // of each stage: micro-batches
  int left = micro_batches * schedule.stages();
  while (left > 0) {
    const std::vector<int> before = done;
    std::vector<bool> busy(static_cast<size_t>(ranks), false);
    const int left_before = left;
    for (int stage = schedule.stages() - 1; stage >= 0; --stage) {
      const auto s = static_cast<size_t>(stage);
      const int there = stage == 0 ? micro_batches : before[s - 1];
      const auto rank = static_cast<size_t>(rank_of[s]);
      if (busy[rank] || done[s] == there) continue;
      schedule.actions[rank].push_back({.kind = Kind::Forward, .stage = stage, .micro_batch = done[s]++});
      busy[rank] = true;
      --left;
    }
    invariant(left < left_before, "no rank can go on");
  }
  return schedule;
}

}  // namespace tessera::schedules
