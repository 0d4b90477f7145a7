#include "tessera/plan/collective_time.h"

#include <algorithm>
#include <cmath>
#include <map>

#include "tessera/plan/read_events.h"

// Latency and bandwidth (Thakur, Rabenseifner, Gropp 2005), of two kinds of links. How many bytes a rank sends at least is what the recorder says of the
// algorithm (comm/traffic.h), and the same for whatever is optimal in bandwidth.

namespace tessera::plan {
namespace {

constexpr int64_t kTreeBytes = int64_t{4} << 20;  ///< above, rings carry more than trees do (NCCL's tuner)

double levels(int among) { return among > 1 ? std::ceil(std::log2(among)) : 0; }

}  // namespace

Placement placement_of(const std::vector<int>& world_ranks, int devices_per_host) {
  std::map<int, int> on_host;
  for (const int rank : world_ranks) ++on_host[rank / devices_per_host];
  Placement placement{.ranks = static_cast<int>(world_ranks.size()), .hosts = static_cast<int>(on_host.size())};
  for (const auto& [host, ranks] : on_host) placement.per_host = std::max(placement.per_host, ranks);
  return placement;
}

CollectiveCost collective_cost(const CollectiveEvent& call, const Placement& placement, const Machine& machine) {
  if (placement.ranks == 1) return {};
  const bool across = placement.hosts > 1;
  if (is_message(call)) {  // of which a receiver sends nothing, and takes as long
    const LinkRates& link = across ? machine.across : machine.inside;
    return {.latency = link.latency, .transfer = static_cast<double>(call.bytes) / link.bandwidth, .across = across};
  }
  const double slower = 1 + machine.across.contention * std::max(0, placement.hosts - 2);
  const double bandwidth = across ? std::min(machine.inside.bandwidth, machine.across.bandwidth * placement.per_host / slower) : machine.inside.bandwidth;
  const double passes = call.op == "all_reduce" ? 2 : 1;
  double latency = passes * (machine.inside.latency * levels(placement.per_host) + machine.across.latency * levels(placement.hosts));
  if (across && call.op != "all_to_all") {  // a ring goes through all ranks; of reductions to all, libraries take a tree where that is shorter
    const double ring =
        passes * ((placement.hosts - 1) * machine.across.hop + (placement.ranks - placement.hosts) * machine.inside.hop + machine.inside.latency);
    latency = call.op == "all_reduce" && call.sent_bytes < kTreeBytes ? std::min(ring, latency) : std::max(ring, latency);
  }
  return {.latency = latency, .transfer = static_cast<double>(call.sent_bytes) / bandwidth, .across = across};
}

}  // namespace tessera::plan
