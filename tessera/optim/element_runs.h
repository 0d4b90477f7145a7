#pragma once

#include <vector>

#include "tessera/kernels/element_run.h"
#include "tessera/layout/slice.h"

namespace tessera::optim {

/// Stretches that are consecutive both in the rank-local tensor, contiguous, and in the logical one; in the order of the local memory.
std::vector<kernels::ElementRun> element_runs(const Slice& slice);

}  // namespace tessera::optim
