#pragma once

#include "tessera/pipeline/schedules/schedule.h"

/// The schedules of the literature, computation alone: pure functions of p ranks (at least 1), m micro-batches (at least 1) and v chunks a rank. Each takes
/// what its domain says and throws ConfigError elsewhere, which names the rule and the next value that works. Fewer micro-batches than stages work unless a
/// domain says otherwise. Peaks are activations of a rank i, in micro-batches of its whole share, held from forward until the gradients of weights are done.
namespace tessera::schedules {

/// One micro-batch after the other through all stages: model parallelism without a pipeline. Peak 1, bubble share of the makespan (p-1)/p. Any p, m, v.
Schedule naive(int ranks, int micro_batches, int chunks = 1);

/// All forwards, then all backwards (arXiv:1811.06965). Peak m, bubble share (p-1)/(m+p-1). Backwards run in the order of the forwards.
Schedule gpipe(int ranks, int micro_batches);

/// A forward and a backward in turns, p-1-i forwards ahead of them (PipeDream-Flush, arXiv:2006.09503; arXiv:2104.04473). Peak min(m, p-i), bubble as GPipe.
Schedule one_f_one_b(int ranks, int micro_batches);

}  // namespace tessera::schedules
