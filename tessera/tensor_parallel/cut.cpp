#include "tessera/tensor_parallel/cut.h"

#include <algorithm>
#include <functional>
#include <numeric>

#include "tessera/layout/slice.h"

// Views are where a cut gets lost: a program that says view({b, s, 32, 128}) may mean the heads of the whole model or of what it holds, and its numbers do not
// tell. A view of the part is right where it is the part of the view of the whole. In strides the piece that is cut goes from `below` to `above`; it must come
// to lie in one new dimension, and either that is the one left to be found (-1), or the plan says how many features make a head. Everything else is refused.

namespace tessera::tensor_parallel {
namespace {

template <class Sizes>
int64_t product(const Sizes& sizes, size_t first, size_t last) {
  return std::accumulate(sizes.begin() + static_cast<std::ptrdiff_t>(first), sizes.begin() + static_cast<std::ptrdiff_t>(last), int64_t{1},
                         std::multiplies<>());
}

/// The piece that is cut, in one dimension with what is merged with it.
Cut in_one(Cut cut) {
  if (cut.outer != 1 || cut.inner == 1) return cut;
  for (FeatureShare& share : cut.shares) {
    share.begin *= cut.inner;
    share.size *= cut.inner;
  }
  cut.units.insert(cut.units.begin(), cut.inner);
  cut.inner = 1;
  return cut;
}

/// Pieces of `unit` elements each, whole on every rank; nothing where a piece lies on two.
std::optional<Cut> in_pieces(Cut cut, int64_t unit) {
  for (FeatureShare& share : cut.shares) {
    if (share.begin % unit != 0 || share.size % unit != 0) return {};
    share.begin /= unit;
    share.size /= unit;
  }
  if (!cut.units.empty() && cut.units.front() == unit) {
    cut.units.erase(cut.units.begin());
  } else {
    cut.units.clear();
  }
  cut.inner = 1;
  return cut;
}

}  // namespace

Cut Cut::in_dim(int64_t other) const {
  Cut cut = *this;
  cut.dim = other;
  return cut;
}

Cut Cut::merged(at::IntArrayRef sizes, int64_t first, int64_t last) const {
  if (last < dim) return in_dim(dim - (last - first));
  if (first > dim) return *this;
  Cut cut = in_dim(first);
  cut.outer *= product(sizes, static_cast<size_t>(first), static_cast<size_t>(dim));
  cut.inner *= product(sizes, static_cast<size_t>(dim + 1), static_cast<size_t>(last + 1));
  return in_one(cut);
}

std::optional<Cut> Cut::rearranged(at::IntArrayRef sizes, std::vector<int64_t> into) const {
  const auto open = std::ranges::find(into, -1);
  const int64_t found = open == into.end() ? -1 : open - into.begin();
  const int64_t elements = product(sizes, 0, sizes.size());
  if (elements == 0 || product(into, 0, into.size()) == 0) return {};
  if (open != into.end()) *open = elements / -product(into, 0, into.size());
  if (product(into, 0, into.size()) != elements) return {};

  // A piece of the order of elements, whose strides go from `below` to `above`, is what is cut; it is looked for among the new dimensions, by its upper end.
  const int64_t below = inner * product(sizes, static_cast<size_t>(dim + 1), sizes.size()), above = below * shares.front().size;
  std::vector<int64_t> places;
  for (size_t place = 0; place < into.size(); ++place) {
    const int64_t low = product(into, place + 1, into.size()), high = low * into[place];
    if (low <= below ? high >= above : low < above && high >= above) places.push_back(static_cast<int64_t>(place));
  }
  // Of one element it does not tell between which others it lies; the dimension that is left to be found does, or one of its own.
  int64_t place = -1;
  if (places.size() == 1) place = places.front();
  if (places.size() > 1) {
    const auto own = [&](int64_t one) { return into[static_cast<size_t>(one)] == 1; };
    if (std::ranges::find(places, found) != places.end()) {
      place = found;
    } else if (std::ranges::count_if(places, own) == 1) {
      place = *std::ranges::find_if(places, own);
    }
  }
  // One piece alone, behind the dimension of the pieces, whose number is left to be found.
  if (found >= 0 && into[static_cast<size_t>(found)] == 1 && product(into, static_cast<size_t>(found) + 1, into.size()) == above) place = found;
  if (place < 0) return {};
  const int64_t size = into[static_cast<size_t>(place)], low = product(into, static_cast<size_t>(place) + 1, into.size());
  Cut cut = *this;
  cut.dim = place;
  if (low > below) {
    // Taken apart: into what is said of a piece, or, where the number of pieces is left to be found, into what the model says.
    if (low % below != 0) return {};
    const int64_t unit = low / below;
    const bool by_plan = found < place && !units.empty() && units.front() == unit;
    if (!by_plan && found != place) return {};
    auto pieces = in_pieces(cut, unit);
    if (!pieces || size % pieces->shares.front().size != 0) return {};
    pieces->outer = size / pieces->shares.front().size;
    return pieces;
  }
  if (below % low != 0) return {};
  cut.inner = below / low;
  if (size % (cut.inner * shares.front().size) != 0) return {};
  cut.outer = size / (cut.inner * shares.front().size);
  // What is left to be found lies elsewhere: the dimension keeps what it holds, or its size is another's.
  if (found >= 0 && found != place && (cut.outer != outer || cut.inner != inner || into[static_cast<size_t>(found)] == 1)) return {};
  return in_one(cut);
}

bool alike(const Cut& a, const Cut& b) {
  return a.outer == b.outer && a.inner == b.inner && std::ranges::equal(a.shares, b.shares, [](const FeatureShare& one, const FeatureShare& other) {
           return one.begin == other.begin && one.size == other.size;
         });
}

bool grouped(const Cut& queries, const Cut& keys) {
  if (!queries.is_plain() || !keys.is_plain() || queries.shares.size() != keys.shares.size() || queries.whole() % keys.whole() != 0)
    return alike(queries, keys);
  const int64_t group = queries.whole() / keys.whole();
  for (size_t rank = 0; rank < queries.shares.size(); ++rank) {
    const FeatureShare &q = queries.shares[rank], &k = keys.shares[rank];
    if (k.size == 0 || q.size % k.size != 0) return false;
    for (int64_t i = 0; i < q.size; ++i) {
      if ((q.begin + i) / group != k.begin + i / (q.size / k.size)) return false;
    }
  }
  return true;
}

std::vector<FeatureShare> even_shares(int64_t whole, int ranks) {
  std::vector<FeatureShare> shares;
  for (int rank = 0; rank < ranks; ++rank) {
    const auto [begin, size] = chunk(whole, ranks, rank);
    shares.push_back({.begin = begin, .size = size, .first_holder = rank, .holders = 1});
  }
  return shares;
}

}  // namespace tessera::tensor_parallel
