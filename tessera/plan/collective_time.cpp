#include "tessera/plan/collective_time.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <tuple>

#include "tessera/plan/read_events.h"

// Latency and bandwidth (Thakur, Rabenseifner, Gropp 2005), of two kinds of links. How many bytes a rank sends at least is what the recorder says of the
// algorithm (comm/traffic.h), and the same for whatever is optimal in bandwidth.

namespace tessera::plan {
namespace {

constexpr int64_t kTreeBytes = int64_t{4} << 20;  ///< above, rings carry more than trees do (NCCL's tuner)

double levels(int among) { return among > 1 ? std::ceil(std::log2(among)) : 0; }

}  // namespace

double with_last_sums(int ranks) {
  constexpr double slower = 0.4;
  constexpr int measured = 8;
  return (1 + slower / (2 * (ranks - 1))) / (1 + slower / (2 * (measured - 1)));
}

Placement placement_of(const std::vector<int>& world_ranks, int devices_per_host) {
  std::map<int, int> on_host;
  for (const int rank : world_ranks) ++on_host[rank / devices_per_host];
  Placement placement{.ranks = static_cast<int>(world_ranks.size()), .hosts = static_cast<int>(on_host.size())};
  placement.fewest = placement.ranks;
  for (const auto& [host, ranks] : on_host) {
    placement.per_host = std::max(placement.per_host, ranks);
    placement.fewest = std::min(placement.fewest, ranks);
  }
  return placement;
}

bool Placement::is_slower_than(const Placement& other) const {
  if ((hosts > 1) != (other.hosts > 1)) return hosts > 1;
  return std::tuple(-fewest, hosts) > std::tuple(-other.fewest, other.hosts);
}

CollectiveCost collective_cost(const CollectiveEvent& call, const Placement& placement, const Machine& machine) {
  if (placement.ranks == 1) return {};
  const bool across = placement.hosts > 1;
  if (is_message(call)) {  // of which a receiver sends nothing, and takes as long
    const LinkRates& link = across ? machine.across : machine.inside;
    return {.latency = link.latency, .transfer = static_cast<double>(call.bytes) / link.bandwidth, .across = across};
  }
  const double link = machine.across.bandwidth / (1 + machine.across.contention * std::max(0, placement.hosts - 2));  // of each device
  const auto sent = static_cast<double>(call.sent_bytes);
  double transfer = sent / (across ? std::min(machine.inside.bandwidth, link * placement.fewest) : machine.inside.bandwidth);
  if (!across && call.op == "all_reduce") transfer *= with_last_sums(placement.ranks);
  if (across && call.op == "all_to_all") {
    const double others = placement.ranks - 1;
    transfer = std::max(sent * (placement.per_host - 1) / others / machine.inside.bandwidth, sent * (placement.ranks - placement.fewest) / others / link);
  }
  const double passes = call.op == "all_reduce" ? 2 : 1;
  double latency = passes * (machine.inside.latency * levels(placement.per_host) + machine.across.latency * levels(placement.hosts));
  if (across && call.op != "all_to_all") {  // a ring goes through all ranks; of reductions to all, libraries take a tree where that is shorter
    const double ring =
        passes * ((placement.hosts - 1) * machine.across.hop + (placement.ranks - placement.hosts) * machine.inside.hop + machine.inside.latency);
    latency = call.op == "all_reduce" && call.sent_bytes < kTreeBytes ? std::min(ring, latency) : std::max(ring, latency);
  }
  return {.latency = latency, .transfer = transfer, .across = across};
}

}  // namespace tessera::plan
