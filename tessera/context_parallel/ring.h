#pragma once

#include <memory>

#include "tessera/context_parallel/context.h"
#include "tessera/context_parallel/travel.h"

namespace tessera::context {

/// Ring self-attention (Liu et al., arXiv:2310.01889): K and V go round, what each block adds to the softmax is merged by log-sum-exp; backward sends them
/// round again with the gradients of the block. `columns`: of each place. A ring of one place is attention on one rank, tile by tile.
std::shared_ptr<const Method> ring_method(Ring ring, std::vector<nn::AttentionColumns> columns, const nn::AttentionReach& reach);

/// Ring self-attention as Li et al. had it (arXiv:2105.13120): a ring of K gives whole rows of scores, then a ring of V their sums. Holds the weights, B H S_r
/// S elements, until backward.
std::shared_ptr<const Method> ring_full_method(Ring ring, std::vector<nn::AttentionColumns> columns, const nn::AttentionReach& reach);

}  // namespace tessera::context
