#pragma once

#include <ATen/core/Tensor.h>

#include "tessera/comm/group.h"

namespace tessera::nn {

/// Contrastive loss of paired embeddings (InfoNCE, arXiv:1807.03748; both ways, as CLIP has it, arXiv:2103.00020): each row of `a` is to find its partner
/// among the rows of `b` of every rank, and the other way round.
///   a, b [n, D]   this rank's pairs, row i of one with row i of the other; scaled to length 1 here
///   scale []      multiplies the cosines before the softmax (exp of a learned temperature)
///   result []     fp32 (of fp64 in fp64): the SUM over this rank's pairs of (H(a_i | b) + H(b_i | a)) / 2; the sum of the ranks' results, over their N pairs,
///   is the loss
///                 of the whole batch on one device, and so are the gradients
/// Every rank must hold as many pairs as layout's rule deals it of `total` (-1: of those that all hold, which the ranks then tell each other in 8 bytes, read
/// on the host). The batch is what one call sees: under gradient accumulation each micro-batch has its own negatives, and accumulation is NOT a bigger batch to
/// this loss.
/// Traffic: one all-gather of 2 N D elements forward, one reduce-scatter of as many backward. Memory: two fp32 matrices [n, N] and the gathered 2 N D.
at::Tensor contrastive_loss_sum(const comm::Group& group, const at::Tensor& a, const at::Tensor& b, const at::Tensor& scale, int64_t total = -1);

}  // namespace tessera::nn
