#pragma once

#include <cstdint>
#include <vector>

/// Rows on their way to the ranks that hold their experts, and back: a value, made by each rank from counts alone.
namespace tessera::experts {

struct Exchange {
  std::vector<int64_t> to;      ///< rows that go to each rank: this rank's rows lie in the order of experts, and so of the ranks that hold them
  std::vector<int64_t> from;    ///< rows that come from each rank
  std::vector<int64_t> order;   ///< of the places behind each other, by expert and then by the rank that sent: which of the rows that came lies there
  std::vector<int64_t> counts;  ///< rows of each expert that is here

  int64_t sent() const;
  int64_t arrived() const { return static_cast<int64_t>(order.size()); }
  bool operator==(const Exchange&) const = default;
};

/// own [E]: this rank's rows of each expert; arriving [ranks * E / ranks]: from each rank, its rows of each expert that is here. Rank r of n holds the experts
/// r * E / n .. (r + 1) * E / n.
Exchange make_exchange(const std::vector<int64_t>& own, const std::vector<int64_t>& arriving, int ranks);

/// Where each row that came lies in the order: the inverse of Exchange::order.
std::vector<int64_t> inverse(const std::vector<int64_t>& order);

}  // namespace tessera::experts
