#pragma once

#include <cstdint>
#include <functional>
#include <vector>

/// How calls that several ranks make together are timed. Standard library alone, so that the peers of `make bench` are timed by the very same code.
namespace tessera::bench {

/// How long to measure one case.
struct Limits {
  double seconds = 0.5;    ///< about as long as the timed calls take together
  int64_t iterations = 0;  ///< exactly so many timed calls instead, where it is not 0
};

/// Time of one call, in microseconds: of the slowest rank.
struct Timing {
  double median_us = 0;
  double min_us = 0;
  int64_t calls = 0;  ///< that were timed
};

/// How often to call, as all ranks agree on. A sample is `batch` calls in a row after a barrier, so that neither the clock nor the ranks' leaving the
/// barrier one after the other weighs on calls of a few microseconds.
struct SamplingPlan {
  int64_t warm_up = 0, batch = 1, samples = 1;
};

/// Samples of 200 us at least, a fifth of the time for warming up, 5 samples at least unless `limits.iterations` says otherwise.
SamplingPlan plan_calls(double seconds_per_call, const Limits& limits);

/// What timing needs of the ranks.
struct Ranks {
  std::function<void()> barrier;
  /// The largest over ranks, place by place; every rank gets the same bits.
  std::function<std::vector<double>(const std::vector<double>& mine)> slowest;
};

/// Times `call` on all ranks after warming up: each rank takes the median (and the least) over its samples, and the slowest rank's numbers count.
/// Every rank calls it, with calls that belong together; all get the same answer.
Timing measure(const Ranks& ranks, const std::function<void()>& call, const Limits& limits);

}  // namespace tessera::bench
