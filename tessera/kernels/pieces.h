#pragma once

#include <algorithm>
#include <cstdint>

namespace tessera::kernels {

/// Calls visit(begin, count) for one piece of [0, all) after the other, each of `most` but for the last, so that what operators take for themselves has a
/// bound. Of a dry run (`on_meta`) the first stands for all: none takes more, and a plan of a large model would run hundreds of thousands of operators.
template <class Visit>
void in_pieces(int64_t all, int64_t most, bool on_meta, const Visit& visit) {
  for (int64_t begin = 0; begin < all; begin += most) {
    visit(begin, std::min(most, all - begin));
    if (on_meta) return;
  }
}

}  // namespace tessera::kernels
