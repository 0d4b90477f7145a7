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

/// How many of `rows` are of experts `first` .. `last`, if each expert has `each` of all.
int64_t of_block(const DryRows& rows, int64_t each, int64_t first, int64_t last) {
  return std::max<int64_t>(0, std::min(rows.begin + rows.size, last * each) - std::max(rows.begin, first * each));
}

std::vector<int64_t> evenly(const DryRows& rows, int64_t experts) {
  std::vector<int64_t> load(static_cast<size_t>(experts));
  const int64_t each = rows.all / experts, more = rows.all % experts;
  for (int64_t expert = 0, first = 0; expert < experts; ++expert) {
    const int64_t last = first + each + (expert < more ? 1 : 0);
    load[static_cast<size_t>(expert)] = of_block(rows, 1, first, last);
    first = last;
  }
  return load;
}

/// The most that a block may have where each expert has 0 to `most`: a rank's part begins where it begins, however many rows there are, so that it meets most
/// of the block where that ends with the part.
int64_t most_of_alike(const DryRows& rows, int64_t most, int64_t first, int64_t last) {
  const int64_t each = std::min(most, (rows.begin + rows.size) / last);
  return std::max(of_block(rows, each, first, last), of_block(rows, std::min(most, each + 1), first, last));
}

}  // namespace

DryRoutingScope::DryRoutingScope(const DryRouting& routing)
    : before_(std::exchange(*assumed, routing)), groups_(routing.load == DryLoad::Most && !routing.alike ? routing.per_token : 0) {}
DryRoutingScope::~DryRoutingScope() { *assumed = before_; }

bool dry_rows_may_drop() {
  const DryRouting& routing = *assumed;
  return (routing.capacity_factor > 0 && !routing.alike) || nn::SampleScope::current().padding.defined();
}

nn::DrySizes dry_sizes(int64_t blocks) {
  const DryRouting& routing = *assumed;
  const bool known = routing.load == DryLoad::Even || ((blocks == 1 || routing.alike) && !dry_rows_may_drop());
  return known ? nn::DrySizes::Known : routing.load == DryLoad::Most ? nn::DrySizes::Most : nn::DrySizes::Least;
}

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

std::vector<int64_t> dry_load(const DryRows& rows, int64_t experts, int64_t block, int64_t here) {
  const DryRouting& routing = *assumed;
  const bool may_be_padding = nn::SampleScope::current().padding.defined();
  std::vector<int64_t> load(static_cast<size_t>(experts), 0), own, others;
  if (routing.load == DryLoad::Fewest && may_be_padding) return load;
  for (int64_t expert = 0; expert < experts; ++expert) (expert / block == here ? own : others).push_back(expert);
  const bool capped = routing.capacity_factor > 0, fewest_here = routing.load == DryLoad::Fewest && capped;
  if (routing.load == DryLoad::Even || (others.empty() && !fewest_here) || (routing.alike && !may_be_padding)) return evenly(rows, experts);
  int64_t to_own = 0;
  if (routing.alike) {
    to_own = most_of_alike(rows, rows.all / experts, block * here, block * (here + 1));
  } else {
    const auto all = static_cast<double>(rows.all);
    const double capacity = std::max(1.0, routing.capacity_factor) * all / static_cast<double>(experts);
    if (routing.load == DryLoad::Fewest) {  // of what a capacity drops nothing is sent, and at the worst all tokens ask for the same experts
      const auto sent = static_cast<int64_t>(std::floor(capacity)) * routing.per_token;
      deal(load, capped ? std::clamp<int64_t>(sent - rows.begin, 0, rows.size) : rows.size, others.empty() ? own : others);
      return load;
    }
    double of_one = all / static_cast<double>(routing.per_token);
    if (capped) of_one = std::min(of_one, capacity + 1);
    to_own = std::min(rows.size, static_cast<int64_t>(std::ceil(of_one)) * block);
  }
  deal(load, to_own, own);
  deal(load, rows.size - to_own, others);
  return load;
}

}  // namespace tessera::experts
