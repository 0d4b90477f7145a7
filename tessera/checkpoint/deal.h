#pragma once

#include <string>
#include <vector>

#include "tessera/layout/slice.h"

namespace tessera::checkpoint {

/// A slice that a rank holds, and its size.
struct HeldSlice {
  Slice slice;
  std::string dtype;  ///< safetensors' name
  int64_t bytes = 0;
};

/// Who writes what: for each rank, the indices of its own slices that it writes, ascending. The same boxes of the same tensor on several ranks are written by
/// one of them: the largest first, each by the holder that has least to write so far (the lowest rank where several have). Buffers ("buffer.") may differ
/// between ranks, as running statistics do: each is written by the first rank that holds it, so that all are one rank's. Empty slices are written by nobody. A
/// pure function: every rank computes the same. Throws InternalError where ranks disagree on a tensor's shape or dtype, or where the slices of a tensor do not
/// cover it.
std::vector<std::vector<size_t>> deal(const std::vector<std::vector<HeldSlice>>& held);

}  // namespace tessera::checkpoint
