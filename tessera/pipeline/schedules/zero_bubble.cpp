// ZB-H1 and ZB-H2 (arXiv:2401.10241): one stage a rank, backwards cut in two. Only the gradient of a stage's inputs has somebody waiting for it; that of its
// weights runs where the rank would idle. Both are told by two numbers of a rank: how many forwards run ahead, and how many micro-batches the weights lag
// behind.

#include <algorithm>

#include "tessera/pipeline/schedules/generators.h"
#include "tessera/pipeline/schedules/list_builder.h"

namespace tessera::schedules {
namespace {

Schedule weights_lag(const char* name, int ranks, int micro_batches, int factor) {
  detail::check_counts(name, ranks, micro_batches);
  Schedule schedule{.name = name, .micro_batches = micro_batches, .rank_of = loop_placement(ranks, 1), .actions = {}};
  for (int rank = 0; rank < ranks; ++rank) {
    const int ahead = factor * (ranks - 1 - rank), lag = factor * rank;
    detail::ListBuilder list(micro_batches);
    for (int backward = 0; backward < micro_batches; ++backward) {
      while (list.forwards(rank) < std::min(backward + ahead + 1, micro_batches)) list.forward(rank);
      list.backward_input(rank);
      if (backward >= lag) list.weights();
    }
    list.all_weights();
    schedule.actions.push_back(list.actions());
  }
  return schedule;
}

}  // namespace

Schedule zb_h1(int ranks, int micro_batches) { return weights_lag("zb_h1", ranks, micro_batches, 1); }
Schedule zb_h2(int ranks, int micro_batches) { return weights_lag("zb_h2", ranks, micro_batches, 2); }

}  // namespace tessera::schedules
