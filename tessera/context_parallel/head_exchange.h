#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include <ATen/core/Tensor.h>

#include "tessera/comm/group.h"
#include "tessera/layout/feature_cut.h"
#include "tessera/layout/sequence_cut.h"

namespace tessera::context {

/// The columns of `ranks`, in the order of the sequence; runs that meet are one.
std::vector<ColumnRun> columns_together(const SequenceCut& cut, const std::vector<int>& ranks);

/// DeepSpeed-Ulysses (Jacobs et al., arXiv:2309.14509): ranks that hold columns of all heads come to hold heads of all their columns, and back. Heads are dealt
/// as tensor parallelism deals them (FeatureCut): query heads with their key-value head, which several ranks get where there are fewer of them than ranks.
/// The value: who is dealt what. n ranks exchange.
struct HeadDeal {
  std::vector<int> ranks;                           ///< that exchange with each other, of a group
  std::vector<std::vector<ColumnRun>> columns;      ///< of each
  std::vector<ColumnRun> together;                  ///< all their columns in the order of the sequence: what is held after the exchange
  std::vector<FeatureShare> query_heads, kv_heads;  ///< of each
  int place = 0;                                    ///< of this rank

  /// Throws ConfigError where there are more ranks than query heads.
  HeadDeal(const SequenceCut& cut, std::vector<int> ranks, int place, int64_t heads, int64_t kv_heads);
};

/// Tensors of one rank: q or anything with its heads, and k, v. Undefined ones take no part.
using HeadTensors = std::array<at::Tensor, 3>;

/// [B, own columns, all heads, D] -> [B, columns together, own heads, D], differentiable, in one all-to-all of `group`, in which the other ranks send nothing.
/// Sent, where all is even: (n-1)/n of B S_r D (H + 2K'), K' key-value heads with their copies; in backward as much, and copies' gradients are summed in fp32.
HeadTensors to_heads(const comm::Group& group, const HeadDeal& deal, const HeadTensors& tensors);
/// The way back, of an output [B, columns together, own query heads, D].
at::Tensor to_columns(const comm::Group& group, const HeadDeal& deal, const at::Tensor& output);

}  // namespace tessera::context
