#include "tessera/layout/feature_cut.h"

#include <algorithm>

#include "tessera/core/error.h"
#include "tessera/layout/slice.h"

namespace tessera {
namespace {

std::vector<FeatureShare> one_by_one(int64_t features, int ranks) {
  require(features >= ranks, "mesh.tp = ", ranks, ": ", features, " features cannot be cut over more ranks than there are; use fewer, or a wider layer");
  std::vector<FeatureShare> shares;
  for (int rank = 0; rank < ranks; ++rank) {
    const auto [begin, size] = chunk(features, ranks, rank);
    shares.push_back({.begin = begin, .size = size, .first_holder = rank});
  }
  return shares;
}

struct Heads {
  FeatureShare queries, keys;
};

std::vector<Heads> deal_heads(int64_t heads, int64_t kv_heads, int ranks) {
  require(kv_heads > 0 && heads % kv_heads == 0, "model.heads = ", heads, " must be a multiple of model.kv_heads = ", kv_heads);
  require(heads >= ranks, "mesh.tp = ", ranks, ": model.heads = ", heads, " cannot be cut over more ranks than there are; use at most ", heads);
  const int64_t group = heads / kv_heads;
  std::vector<Heads> dealt;
  for (int rank = 0; rank < ranks; ++rank) {
    if (ranks <= kv_heads) {
      const auto [begin, size] = chunk(kv_heads, ranks, rank);
      dealt.push_back({.queries = {begin * group, size * group, rank}, .keys = {begin, size, rank}});
      continue;
    }
    // The key-value head whose run of ranks this one is in.
    int64_t head = 0;
    std::pair<int64_t, int64_t> holders;
    for (; head < kv_heads; ++head) {
      holders = chunk(ranks, static_cast<int>(kv_heads), static_cast<int>(head));
      if (rank < holders.first + holders.second) break;
    }
    const auto [begin, size] = chunk(group, static_cast<int>(holders.second), static_cast<int>(rank - holders.first));
    dealt.push_back({.queries = {head * group + begin, size, rank}, .keys = {head, 1, static_cast<int>(holders.first), static_cast<int>(holders.second)}});
  }
  return dealt;
}

}  // namespace

std::vector<FeatureShare> FeatureCut::shares(int64_t features, int ranks) const {
  invariant(ranks > 0, "features cut over ", ranks, " ranks");
  if (by == By::Feature) return one_by_one(features, ranks);
  const int64_t count = by == By::QueryHead ? heads : kv_heads;
  require(count > 0 && features % count == 0, features, " features are no multiple of ", count, by == By::QueryHead ? " heads" : " key-value heads");
  const int64_t width = features / count;
  std::vector<FeatureShare> shares;
  for (const Heads& dealt : deal_heads(heads, kv_heads, ranks)) {
    FeatureShare share = by == By::QueryHead ? dealt.queries : dealt.keys;
    share.begin *= width;
    share.size *= width;
    shares.push_back(share);
  }
  return shares;
}

}  // namespace tessera
