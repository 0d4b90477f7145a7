#pragma once

#include <vector>

#include "tessera/config/config.h"

namespace tessera::plan {

/// Of worlds up to this, ranks that hold a row more or less are told apart.
constexpr int kExactRanks = 8;

/// Ranks of a world that do the same step on tensors of the same sizes, a list for each class, in ascending order; the first of a list stands for all of it.
/// They differ in how many micro-batches they hold, in their role in the deterministic tree, and in which elements of what is sharded are theirs.
/// In a sharded world of more than `exact_ranks` that last difference, of a few rows or of padding, makes no class: the rank that holds most comes first in its
/// own. Nor do there the ranks that layers are cut over, where all cuts are even, nor parts of a sequence that meet the same tiles of attention in another
/// order. `documents`: how many a window of packed ones has.
std::vector<std::vector<int>> rank_classes(const Config& config, int world_size, int exact_ranks = kExactRanks, int64_t documents = 1);

}  // namespace tessera::plan
