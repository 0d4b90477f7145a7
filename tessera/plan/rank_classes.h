#pragma once

#include <vector>

#include "tessera/config/config.h"
#include "tessera/expert_parallel/dry_load.h"
#include "tessera/plan/pipeline_plan.h"

namespace tessera::plan {

/// Of worlds up to this, ranks that hold a row more or less are told apart.
constexpr int kExactRanks = 8;

/// Ranks of a world that do the same step on tensors of the same sizes, a list for each class, in ascending order; the first of a list stands for all of it.
/// They differ in how many micro-batches they hold, in their role in the deterministic tree, in how many rows come to their experts, and in which elements of
/// what is sharded are theirs. In a sharded world of more than `exact_ranks` that last difference, of a few rows or of padding, makes no class, nor do rows of
/// experts that differ by less than a sixteenth of the most: the rank with most rows, and of these the one that holds most, comes first in its own. Nor do
/// there the ranks that layers are cut over, where all cuts are even, nor parts of a sequence that meet the same tiles of attention in another order.
/// `pipeline`: of plan_pipeline; what a rank between its ends holds is asked once for those that hold as many layers.
/// `documents`: how many a window of packed ones has; `routed`: what routers are taken to send.
std::vector<std::vector<int>> rank_classes(const Config& config, int world_size, const PipelinePlan& pipeline, int exact_ranks = kExactRanks,
                                           int64_t documents = 1, experts::DryLoad routed = experts::DryLoad::Even);

}  // namespace tessera::plan
