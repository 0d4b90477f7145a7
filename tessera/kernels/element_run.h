#pragma once

#include <cstdint>

namespace tessera::kernels {

/// Consecutive elements of the logical tensor that lie one after the other in memory, too.
struct ElementRun {
  int64_t offset = 0;  ///< of the first, in the local tensors' memory
  int64_t count = 0;
  uint64_t first_index = 0;  ///< of the first, in the logical tensor
};

}  // namespace tessera::kernels
