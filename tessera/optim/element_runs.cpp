#include "tessera/optim/element_runs.h"

#include <algorithm>
#include <cstdint>
#include <utility>

namespace tessera::optim {

std::vector<kernels::ElementRun> element_runs(const Slice& slice) {
  std::vector<kernels::ElementRun> runs;
  const auto local_shape = slice.local_shape();
  for (size_t i = 0; i < slice.boxes.size(); ++i) {
    // Both walk the box in row-major order, each in pieces of its own length.
    std::vector<std::pair<int64_t, int64_t>> logical;
    for_each_run(slice.shape, slice.boxes[i], [&](int64_t first, int64_t count) { logical.emplace_back(first, count); });
    size_t at = 0;
    for_each_run(local_shape, slice.local_box(i), [&](int64_t first, int64_t count) {
      while (count > 0) {
        auto& [index, left] = logical[at];
        const int64_t size = std::min(count, left);
        runs.push_back({.offset = first, .count = size, .first_index = static_cast<uint64_t>(index)});
        first += size, count -= size, index += size, left -= size;
        if (left == 0) ++at;
      }
    });
  }
  return runs;
}

}  // namespace tessera::optim
