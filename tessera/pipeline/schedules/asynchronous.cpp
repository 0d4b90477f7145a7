// PipeDream and PipeDream-2BW: the order of 1F1B that never flushes, with updates of the weights in its midst. What makes them correct is which version of its
// weights an action computes with, so versions are part of the actions: a stage's version is the number of its updates so far, and a backward uses that of its
// forward, which the stage has to keep until then.

#include <algorithm>
#include <utility>

#include "tessera/core/error.h"
#include "tessera/pipeline/schedules/generators.h"

namespace tessera::schedules {
namespace {

/// 1F1B with the version of each micro-batch from `version(rank, micro_batch)`, and an update behind each backward that `updates_after` names.
Schedule with_updates(const char* name, int ranks, int micro_batches, auto&& version, auto&& updates_after) {
  Schedule schedule = one_f_one_b(ranks, micro_batches);
  schedule.name = name;
  for (int rank = 0; rank < ranks; ++rank) {
    RankActions actions;
    int updates = 0;
    for (Action action : schedule.actions[rank]) {
      action.version = version(rank, action.micro_batch);
      actions.push_back(action);
      if (action.kind == Kind::Backward && updates_after(action.micro_batch))
        actions.push_back({.kind = Kind::Update, .stage = rank, .micro_batch = action.micro_batch, .version = ++updates});
    }
    schedule.actions[rank] = actions;
  }
  return schedule;
}

}  // namespace

Schedule pipedream(int ranks, int micro_batches, bool vertical_sync) {
  // Before its forward of micro-batch b, a stage that runs a forwards ahead has done the backwards, and updates, of all but the last a micro-batches before it.
  return with_updates(
      "pipedream", ranks, micro_batches, [&](int rank, int micro_batch) { return std::max(0, micro_batch - (ranks - 1 - (vertical_sync ? 0 : rank))); },
      [](int) { return true; });
}

Schedule pipedream_2bw(int ranks, int micro_batches, int per_update) {
  const int fewest = std::min(ranks, micro_batches);
  if (per_update == 0) per_update = fewest;
  require_of("per_update", per_update >= fewest, "pipedream_2bw: per_update = ", per_update,
             ": two versions of the weights are enough where an update sums at least as many ", "micro-batches as there are stages; take ", fewest);
  return with_updates(
      "pipedream_2bw", ranks, micro_batches, [&](int, int micro_batch) { return std::max(0, micro_batch / per_update - 1); },
      [&](int micro_batch) { return (micro_batch + 1) % per_update == 0 || micro_batch + 1 == micro_batches; });
}

Schedule with_late_updates(Schedule schedule, int stage) {
  invariant(stage >= 0 && stage < schedule.stages(), "late updates of stage ", stage, " of ", schedule.stages());
  RankActions& actions = schedule.actions[static_cast<size_t>(schedule.rank_of[static_cast<size_t>(stage)])];
  RankActions updates, late;
  for (const Action& action : actions) {
    if (action.kind == Kind::Update && action.stage == stage) updates.push_back(action);
  }
  auto next = updates.begin();
  for (const Action& action : actions) {
    if (action.kind == Kind::Update && action.stage == stage) continue;
    while (action.stage == stage && action.computes() && next != updates.end() && next->version <= action.version) late.push_back(*next++);
    late.push_back(action);
  }
  late.insert(late.end(), next, updates.end());
  actions = std::move(late);
  return schedule;
}

}  // namespace tessera::schedules
