#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include <ATen/core/Tensor.h>

#include "tessera/layout/feature_cut.h"

namespace tessera::tensor_parallel {

/// Where a tensor is cut over the ranks of a group, as the first rank sees it: dimension `dim` holds outer x (its share) x inner elements, the whole tensor
/// outer x (the last share's end) x inner. Rearranging a tensor moves the cut and never loses it, or it is refused.
struct Cut {
  int64_t dim = 0;
  std::vector<FeatureShare> shares{};  ///< one a rank
  int64_t outer = 1, inner = 1;        ///< of what was merged with it into one dimension
  std::vector<int64_t> units{};        ///< what the plan says of the elements in one piece of it, innermost first: features of a head, queries of a key
  bool defined() const { return !shares.empty(); }

  int64_t size() const { return outer * shares.front().size * inner; }
  int64_t whole() const { return shares.back().begin + shares.back().size; }
  bool is_plain() const { return outer == 1 && inner == 1; }  ///< nothing else lies in its dimension

  Cut in_dim(int64_t other) const;
  /// Dimensions first..last merged into one.
  Cut merged(at::IntArrayRef sizes, int64_t first, int64_t last) const;
  /// The same elements in order as `into`, which may have one -1. Nothing where the whole tensor would not be rearranged likewise, or nobody can tell: a number
  /// of heads is given that was meant for all ranks, say, and the features of each head are left to be found.
  std::optional<Cut> rearranged(at::IntArrayRef sizes, std::vector<int64_t> into) const;
};

/// Whether each rank holds the same part of both, wherever it lies.
bool alike(const Cut& a, const Cut& b);

/// Whether each rank holds, for its part of the query heads, just the key-value heads that they share.
bool grouped(const Cut& queries, const Cut& keys);

/// The parts of `whole` elements by layout's rule.
std::vector<FeatureShare> even_shares(int64_t whole, int ranks);

}  // namespace tessera::tensor_parallel
