#include "tessera/context_parallel/ring_plan.h"

namespace tessera::context {

int64_t RingStep::pairs() const {
  int64_t sum = 0;
  for (const nn::AttentionTile& tile : tiles) sum += tile.pairs();
  return sum;
}

std::vector<RingStep> ring_plan(const std::vector<nn::AttentionColumns>& columns, int place, bool causal) {
  const int places = static_cast<int>(columns.size());
  std::vector<RingStep> steps;
  for (int step = 0; step < places; ++step) {
    const int block = (place - step + places) % places;
    steps.push_back({.block = block,
                     .tiles = nn::attention_tiles(columns[static_cast<size_t>(place)], columns[static_cast<size_t>(block)], causal),
                     .keys_go_on = step + 1 < places,
                     .sum_comes = step >= 2,  // the place before was the owner one step earlier, and keeps its share
                     .sum_goes_on = step >= 1});
  }
  return steps;
}

}  // namespace tessera::context
