#pragma once

#include <array>
#include <cstdint>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include "tessera/comm/exchange.h"
#include "tessera/comm/group.h"

/// All-gather and reduce-scatter step by step, so that something can be computed while each step is on its way. Ranks form a ring: each receives from the one
/// before it and sends to the one after. A tensor [B, S, ...] is cut along S by layout's rule; parts may be uneven or empty. n ranks: each sends n-1 parts,
/// (n-1)/n of the whole where they are even. One rank: nothing is sent.
namespace tessera::tensor_parallel {

/// Visits the parts of all ranks: its own first, then that of the rank before, and so on backwards; while one is in use the next is on its way.
/// Memory: two parts (Comm).
///   for (GatherRing ring(group, own, S); !ring.done(); ring.advance()) use(ring.begin(), ring.part());
class GatherRing {
 public:
  /// `own`: this rank's part, contiguous, of a whole with `positions` along dimension 1. Starts the first exchange.
  GatherRing(comm::Group group, const at::Tensor& own, int64_t positions);

  bool done() const { return step_ == group_.size(); }
  int64_t begin() const { return span().first; }  ///< first position of part()
  /// Valid until advance.
  const at::Tensor& part() const { return part_; }
  /// Waits for the next part, and starts the exchange for the one after it.
  void advance();

 private:
  std::pair<int64_t, int64_t> span() const;
  void exchange();

  comm::Group group_;
  int64_t positions_;
  int step_ = 0;
  std::array<at::Tensor, 2> memory_;
  at::Tensor part_, next_;
  comm::Exchange exchange_;
};

/// Adds up the ranks' terms of every part, and leaves each rank its own part of the sum: rank r begins with the part of the rank before it, and ends with its
/// own. While the sum so far is on its way here, this rank computes its term. Sums are made in the tensor's dtype, in the ring's order.
/// Memory: three parts (Comm) and the result.
///   SumRing ring(group, {B, S, F}, options);
///   while (!ring.done()) { compute(ring.begin(), ring.term()); ring.pass_on(); }
///   at::Tensor sum = ring.take();
class SumRing {
 public:
  SumRing(comm::Group group, std::vector<int64_t> whole, const at::TensorOptions& options);

  bool done() const { return step_ == group_.size(); }
  int64_t begin() const { return span().first; }  ///< first position of the part whose term is due
  /// Where that term goes: [B, its positions, ...], contiguous, undefined in content.
  const at::Tensor& term() const { return term_; }
  /// The term is written: adds what the ranks before made of this part, and sends it on.
  void pass_on();
  /// This rank's part of the sum, once done.
  at::Tensor take() { return std::move(term_); }

 private:
  std::pair<int64_t, int64_t> span() const;
  at::Tensor part_of(const at::Tensor& memory) const;
  void begin_term();

  comm::Group group_;
  std::vector<int64_t> whole_;
  at::TensorOptions options_;
  int step_ = 0;
  std::array<at::Tensor, 2> memory_;
  at::Tensor incoming_, term_;
  comm::Exchange exchange_;
};

}  // namespace tessera::tensor_parallel
