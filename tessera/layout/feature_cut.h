#pragma once

#include <cstdint>
#include <vector>

namespace tessera {

/// What one rank holds of a dimension of features that is cut over a tensor-parallel group: `begin` .. `begin + size`. Where there are more ranks than
/// key-value heads several hold the same: the ranks `first_holder` .. `first_holder + holders` of the group.
struct FeatureShare {
  int64_t begin = 0, size = 0;
  int first_holder = 0, holders = 1;
  bool operator==(const FeatureShare&) const = default;
};

/// How features are dealt over ranks: one by one, or, inside attention, by whole heads, so that a rank's queries find the keys that they need on the rank
/// itself.
///
/// Query heads go with their key-value head. While ranks are no more than key-value heads, these are dealt by layout's rule (chunk) and bring their queries
/// along; with more ranks, the ranks are dealt over the key-value heads, those of one head all hold it, and deal its queries. So on every rank the number of
/// queries is a multiple of the number of keys.
struct FeatureCut {
  enum class By { Feature, QueryHead, KeyValueHead };
  By by = By::Feature;
  int64_t heads = 0, kv_heads = 0;  ///< of the whole model; not used by Feature
  bool operator==(const FeatureCut&) const = default;

  static FeatureCut query_heads(int64_t heads, int64_t kv_heads) { return {By::QueryHead, heads, kv_heads}; }
  static FeatureCut key_value_heads(int64_t heads, int64_t kv_heads) { return {By::KeyValueHead, heads, kv_heads}; }

  /// One share a rank. Throws ConfigError where there are more ranks than features (or query heads), so that a rank would hold none, and where heads do not
  /// divide the features.
  std::vector<FeatureShare> shares(int64_t features, int ranks) const;
};

}  // namespace tessera
