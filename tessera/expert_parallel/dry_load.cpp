#include "tessera/expert_parallel/dry_load.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "tessera/nn/sample_scope.h"

namespace tessera::experts {
namespace {

const Ambient<DryRouting> assumed;

/// Evenly, the first ones one more where they do not go up.
void deal(std::vector<int64_t>& load, int64_t rows, const std::vector<int64_t>& to) {
  const auto count = static_cast<int64_t>(to.size());
  for (int64_t i = 0; i < count; ++i) load[static_cast<size_t>(to[static_cast<size_t>(i)])] += rows / count + (i < rows % count ? 1 : 0);
}

}  // namespace

DryRoutingScope::DryRoutingScope(const DryRouting& routing) : before_(std::exchange(*assumed, routing)) {}
DryRoutingScope::~DryRoutingScope() { *assumed = before_; }

int64_t dry_rows_of(int other, int64_t rows, int world_rank) {
  const auto& tokens = (*assumed).tokens;
  if (!tokens) return rows;
  const int64_t here = tokens(world_rank);
  return here > 0 ? rows * tokens(other) / here : tokens(other) * (*assumed).per_token;
}

int dry_part_of(int world_rank, int otherwise) {
  const auto& part = (*assumed).part;
  return part ? part(world_rank) : otherwise;
}

std::vector<int64_t> dry_load(int64_t rows, int64_t experts, int64_t block, int64_t here, int routed_by) {
  const DryRouting& routing = *assumed;
  std::vector<int64_t> load(static_cast<size_t>(experts), 0), own, others;
  if (routing.load == DryLoad::Fewest && nn::SampleScope::current().padding.defined()) return load;
  for (int64_t expert = 0; expert < experts; ++expert) (expert / block == here ? own : others).push_back(expert);
  if (routing.load == DryLoad::Even || others.empty()) {
    own.insert(own.end(), others.begin(), others.end());
    std::ranges::sort(own);
    deal(load, rows, own);
    return load;
  }
  const auto share = static_cast<double>(rows) * routed_by;
  const double capacity = std::max(1.0, routing.capacity_factor) * share / static_cast<double>(experts);
  const bool capped = routing.capacity_factor > 0;
  if (routing.load == DryLoad::Fewest) {  // of what a capacity drops nothing is sent, and at the worst all tokens ask for the same experts
    const double sent = routed_by > 1 ? 0 : std::floor(capacity) * static_cast<double>(routing.per_token);
    deal(load, capped ? std::min(rows, static_cast<int64_t>(sent)) : rows, others);
    return load;
  }
  double of_one = share / static_cast<double>(routing.per_token);
  if (capped) of_one = std::min(of_one, capacity + 1);
  const int64_t to_own = std::min(rows, static_cast<int64_t>(std::ceil(of_one)) * block);
  deal(load, to_own, own);
  deal(load, rows - to_own, others);
  return load;
}

}  // namespace tessera::experts
