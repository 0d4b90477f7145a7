#include "tessera/expert_parallel/exchange.h"

#include <numeric>

#include "tessera/core/error.h"

namespace tessera::experts {

int64_t Exchange::sent() const { return std::accumulate(to.begin(), to.end(), int64_t{0}); }

Exchange make_exchange(const std::vector<int64_t>& own, const std::vector<int64_t>& arriving, int ranks) {
  invariant(ranks >= 1 && own.size() % static_cast<size_t>(ranks) == 0 && arriving.size() == own.size(), "an exchange of ", own.size(), " and ",
            arriving.size(), " experts over ", ranks, " ranks");
  const size_t here = own.size() / static_cast<size_t>(ranks);
  Exchange exchange{.to = std::vector<int64_t>(static_cast<size_t>(ranks)),
                    .from = std::vector<int64_t>(static_cast<size_t>(ranks)),
                    .order = {},
                    .counts = std::vector<int64_t>(here)};
  std::vector<int64_t> first(own.size());  // of the rows that come from a rank for an expert
  int64_t arrived = 0;
  for (size_t i = 0; i < own.size(); ++i) {
    first[i] = arrived;
    arrived += arriving[i];
    exchange.to[i / here] += own[i];
    exchange.from[i / here] += arriving[i];
    exchange.counts[i % here] += arriving[i];
  }
  exchange.order.reserve(static_cast<size_t>(arrived));
  for (size_t expert = 0; expert < here; ++expert) {
    for (size_t i = expert; i < own.size(); i += here) {
      for (int64_t row = 0; row < arriving[i]; ++row) exchange.order.push_back(first[i] + row);
    }
  }
  return exchange;
}

std::vector<int64_t> for_each_sharer(const std::vector<int64_t>& own, int ranks, int sharers) {
  const size_t here = own.size() * static_cast<size_t>(sharers) / static_cast<size_t>(ranks);
  std::vector<int64_t> to;
  to.reserve(own.size() * static_cast<size_t>(sharers));
  for (int rank = 0; rank < ranks; ++rank) {
    const auto first = own.begin() + static_cast<std::ptrdiff_t>(static_cast<size_t>(rank / sharers) * here);
    to.insert(to.end(), first, first + static_cast<std::ptrdiff_t>(here));
  }
  return to;
}

Copies make_copies(const std::vector<int64_t>& to, int sharers) {
  const auto places = static_cast<size_t>(std::accumulate(to.begin(), to.end(), int64_t{0}));
  Copies copies{.slots = std::vector<int64_t>(places), .order = std::vector<int64_t>(places)};
  int64_t place = 0, first = 0;  // of the block that a group of sharers is sent
  for (size_t rank = 0; rank < to.size(); ++rank) {
    const auto sharer = static_cast<int64_t>(rank) % sharers;
    for (int64_t row = 0; row < to[rank]; ++row, ++place) {
      const int64_t copy = (first + row) * sharers + sharer;
      copies.order[static_cast<size_t>(place)] = copy;
      copies.slots[static_cast<size_t>(copy)] = place;
    }
    if (sharer + 1 == sharers) first += to[rank];
  }
  return copies;
}

std::vector<int64_t> inverse(const std::vector<int64_t>& order) {
  std::vector<int64_t> places(order.size());
  for (size_t place = 0; place < order.size(); ++place) places[static_cast<size_t>(order[place])] = static_cast<int64_t>(place);
  return places;
}

}  // namespace tessera::experts
