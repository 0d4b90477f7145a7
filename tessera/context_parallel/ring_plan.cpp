#include "tessera/context_parallel/ring_plan.h"

namespace tessera::context {

int64_t RingStep::pairs() const {
  int64_t sum = 0;
  for (const nn::AttentionTile& tile : tiles) sum += tile.pairs();
  return sum;
}

namespace {

/// Whose block is with a place in a step.
int block_at(int place, int step, int places) { return (place - step + places) % places; }

/// The last step in which a place has anything within reach of the block that is with it.
int last_step(const std::vector<nn::AttentionColumns>& columns, const nn::AttentionReach& reach) {
  const int places = static_cast<int>(columns.size());
  for (int step = places - 1; step > 0; --step) {
    for (int place = 0; place < places; ++place) {
      const auto& queries = columns[static_cast<size_t>(place)];
      const auto& keys = columns[static_cast<size_t>(block_at(place, step, places))];
      if (nn::within_reach(queries, keys, reach)) return step;
    }
  }
  return 0;
}

}  // namespace

std::vector<RingStep> ring_plan(const std::vector<nn::AttentionColumns>& columns, int place, const nn::AttentionReach& reach) {
  const int places = static_cast<int>(columns.size()), last = last_step(columns, reach);
  std::vector<RingStep> steps;
  for (int step = 0; step <= last; ++step) {
    const int block = block_at(place, step, places);
    steps.push_back({.block = block,
                     .tiles = nn::attention_tiles(columns[static_cast<size_t>(place)], columns[static_cast<size_t>(block)], reach),
                     .keys_go_on = step < last,
                     .sum_comes = step >= 2,  // the place before was the owner one step earlier, and keeps its share
                     .sum_goes_on = step >= 1,
                     .sum_to = step < 1      ? -1
                               : step < last ? (place + 1) % places
                                             : block,
                     .own_comes_from = step < last || last == 0 ? -1 : (place + last) % places});
  }
  return steps;
}

}  // namespace tessera::context
