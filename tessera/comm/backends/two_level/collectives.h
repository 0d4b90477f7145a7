#pragma once

#include <ATen/core/Tensor.h>

#include "tessera/comm/backends/two_level/two_level.h"

namespace tessera::comm {

/// The collectives of a two-level group, one after the other on the calling thread. two_level.h says what each costs.
class TwoLevelCollectives {
 public:
  /// Below this an all_reduce's three short messages inside a host cost more than sending every byte between hosts once per member.
  static constexpr int64_t kSmallest = 16 << 10;

  /// `levels` is kept by reference.
  TwoLevelCollectives(const Levels& levels, int rank) : levels_(levels), rank_(rank) {}

  void all_reduce(const at::Tensor& tensor, Op op) const;
  void reduce(const at::Tensor& tensor, int root, Op op) const;
  void broadcast(const at::Tensor& tensor, int root) const;
  void all_gather(const at::Tensor& out, const at::Tensor& in) const;
  void reduce_scatter(const at::Tensor& out, const at::Tensor& in, Op op) const;
  void barrier() const;

 private:
  bool even() const { return levels_.hosts.even(); }
  bool leads() const { return levels_.hosts.local_rank(rank_) == 0; }

  const Levels& levels_;
  int rank_;
};

}  // namespace tessera::comm
