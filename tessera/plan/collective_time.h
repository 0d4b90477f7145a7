#pragma once

#include <vector>

#include "tessera/core/events.h"
#include "tessera/plan/machine.h"

namespace tessera::plan {

/// Where the ranks of a group lie.
struct Placement {
  int ranks = 1;
  int hosts = 1;
  int per_host = 1;  ///< on the host that has most of them
  int fewest = 1;    ///< and on the one that has fewest

  /// Whether a collective takes longer than in `other`, where as many ranks meet.
  bool is_slower_than(const Placement& other) const;
};
Placement placement_of(const std::vector<int>& world_ranks, int devices_per_host);

/// What a collective takes alone on its links.
struct CollectiveCost {
  double latency = 0;   ///< seconds in which nothing fills a link
  double transfer = 0;  ///< and in which its bytes do
  bool across = false;  ///< links between hosts; else those inside one
  double seconds() const { return latency + transfer; }
};

/// By what an all-reduce of so many ranks of one host, two and more, takes longer than its bytes do at the rate of its machine, which is that of eight. The
/// share that a rank is the last to add to, one of n, it writes out and sends in the same pass, which is slower than to do one of them: nccl-tests on one host
/// of A100 reach 197 GB/s among two ranks, 222 among four and 229 among eight.
double with_last_sums(int ranks);

/// What a ring of the group's ranks sends, by the slowest of its links, and one latency a step, or, where a tree takes fewer, a level. A ring that enters a
/// host leaves it by another device's link, so that as many links carry it as the group has ranks there: those of the host that has fewest. What each rank has
/// for each other (all_to_all) goes over its own link where that lies on another host.
CollectiveCost collective_cost(const CollectiveEvent& call, const Placement& placement, const Machine& machine);

}  // namespace tessera::plan
