#pragma once

#include "cli/bench/sampling.h"
#include "tessera/plan/device.h"

namespace tessera::bench {

/// What this process reaches on the CPU with the threads that it has, in the terms of a device's file: products by number format, memory, attention, and the
/// time of an operator without work. Cost: some seconds by `limits`, and a quarter of a gigabyte.
plan::Device measure_device(const Limits& limits);

/// What two and more ranks of this host reach: all-reduces of a small and of a large buffer, in seconds.
struct AllReduces {
  int ranks = 0;
  int64_t small_bytes = 0, large_bytes = 0;
  double small = 0, large = 0;
};
void add_links(plan::Device& device, const AllReduces& measured);

}  // namespace tessera::bench
