// Naive model parallelism, GPipe and 1F1B: schedules without chunks and with whole backwards. Micro-batches pass every stage in their order, forward and
// backward, so that one number tells a rank's list: how many forwards run ahead of its backwards.

#include <algorithm>

#include "tessera/core/error.h"
#include "tessera/pipeline/schedules/generators.h"
#include "tessera/pipeline/schedules/list_builder.h"

namespace tessera::schedules {
namespace {

constexpr int64_t kMostActions = 1 << 22;

Schedule ahead_by(const char* name, int ranks, int micro_batches, auto&& ahead) {
  detail::check_counts(name, ranks, micro_batches);
  Schedule schedule{.name = name, .micro_batches = micro_batches, .rank_of = loop_placement(ranks, 1), .actions = {}};
  for (int rank = 0; rank < ranks; ++rank) {
    detail::ListBuilder list(micro_batches);
    for (int backward = 0; backward < micro_batches; ++backward) {
      while (list.forwards(rank) < std::min(backward + ahead(rank) + 1, micro_batches)) list.forward(rank);
      list.backward(rank);
    }
    schedule.actions.push_back(list.actions());
  }
  return schedule;
}

}  // namespace

namespace detail {

void check_counts(const char* name, int ranks, int micro_batches, int chunks) {
  require_of("ranks", ranks >= 1, name, ": stages = ", ranks, ": at least 1");
  require_of("micro_batches", micro_batches >= 1, name, ": micro_batches = ", micro_batches, ": at least 1");
  require_of("chunks", chunks >= 1, name, ": virtual_stages = ", chunks, ": at least 1");
  const bool few = ranks <= kMostActions && micro_batches <= kMostActions && chunks <= kMostActions;
  require_of("micro_batches", few && int64_t{ranks} * chunks <= kMostActions && int64_t{ranks} * chunks * micro_batches <= kMostActions, name, ": ", ranks,
             " x ", chunks, " stages with ", micro_batches, " micro-batches: a schedule holds at most ", kMostActions,
             " of their products; take fewer micro-batches");
}

}  // namespace detail

Schedule naive(int ranks, int micro_batches, int chunks) {
  detail::check_counts("naive", ranks, micro_batches, chunks);
  Schedule schedule{.name = "naive", .micro_batches = micro_batches, .rank_of = loop_placement(ranks, chunks), .actions = {}};
  std::vector<detail::ListBuilder> lists(ranks, detail::ListBuilder(micro_batches));
  for (int micro_batch = 0; micro_batch < micro_batches; ++micro_batch) {
    for (int stage = 0; stage < schedule.stages(); ++stage) lists[schedule.rank_of[stage]].forward(stage);
    for (int stage = schedule.stages() - 1; stage >= 0; --stage) lists[schedule.rank_of[stage]].backward(stage);
  }
  for (const auto& list : lists) schedule.actions.push_back(list.actions());
  return schedule;
}

Schedule gpipe(int ranks, int micro_batches) {
  return ahead_by("gpipe", ranks, micro_batches, [&](int) { return micro_batches - 1; });
}

Schedule one_f_one_b(int ranks, int micro_batches) {
  return ahead_by("1f1b", ranks, micro_batches, [&](int rank) { return ranks - 1 - rank; });
}

}  // namespace tessera::schedules
