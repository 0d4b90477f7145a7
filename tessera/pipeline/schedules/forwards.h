#pragma once

#include <vector>

#include "tessera/pipeline/schedules/schedule.h"

namespace tessera::schedules {

/// Forwards alone, of `micro_batches` through stages that lie anywhere: what a model does that is validated, or makes text. Each rank runs what has come, of
/// the latest stage first, so that micro-batches leave before others enter; where every forward takes as long as every other, p ranks with v chunks each need
/// v m + p - 1 of that time in a loop (loop_placement).
Schedule forwards(const std::vector<int>& rank_of, int ranks, int micro_batches);

}  // namespace tessera::schedules
