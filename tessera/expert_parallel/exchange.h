#pragma once

#include <cstdint>
#include <vector>

/// Rows on their way to the ranks that hold their experts, and back: a value, made by each rank from counts alone.
namespace tessera::experts {

struct Exchange {
  std::vector<int64_t> to;      ///< rows that go to each rank, one rank's behind the other's
  std::vector<int64_t> from;    ///< rows that come from each rank
  std::vector<int64_t> order;   ///< of the places behind each other, by expert and then by the rank that sent: which of the rows that came lies there
  std::vector<int64_t> counts;  ///< rows of each expert that is here

  int64_t sent() const;
  int64_t arrived() const { return static_cast<int64_t>(order.size()); }
  bool operator==(const Exchange&) const = default;
};

/// own, arriving [ranks * experts of a rank]: to each rank, this rank's rows of each expert that is there; from each rank, its rows of each expert that is
/// here.
Exchange make_exchange(const std::vector<int64_t>& own, const std::vector<int64_t>& arriving, int ranks);

/// What goes to each rank of an exchange of E experts in which `sharers` neighbours share each: rank r of n holds experts of block r / sharers, so a block's
/// counts are there once for each. own [E] -> [ranks * E * sharers / ranks].
std::vector<int64_t> for_each_sharer(const std::vector<int64_t>& own, int ranks, int sharers);

/// Copies of rows for the ranks that share their experts, as kernels::Dispatch has them: a row of this rank is a token there, and each sharer a choice.
struct Copies {
  std::vector<int64_t> slots;  ///< [rows * sharers]: the place of each copy
  std::vector<int64_t> order;  ///< [rows * sharers]: the copy in each place; rank by rank, and the rows of one in their order
};

/// `to` as Exchange has it: neighbours that share experts are sent the same rows.
Copies make_copies(const std::vector<int64_t>& to, int sharers);

/// Where each row that came lies in the order: the inverse of Exchange::order.
std::vector<int64_t> inverse(const std::vector<int64_t>& order);

}  // namespace tessera::experts
