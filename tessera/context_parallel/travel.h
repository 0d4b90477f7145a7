#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include <ATen/core/Tensor.h>

#include "tessera/comm/exchange.h"
#include "tessera/comm/group.h"
#include "tessera/context_parallel/ring_plan.h"

/// What goes round a ring, as its plan says. Letters: u elements of one place's keys.
namespace tessera::context {

/// Ranks of a group in the order of a ring, and how many columns each holds.
struct Ring {
  comm::Group group;
  std::vector<int> ranks;        ///< of the group, by place
  std::vector<int64_t> columns;  ///< by place
  int place = 0;                 ///< of this rank
  bool overlap = true;

  int places() const { return static_cast<int>(ranks.size()); }
  int rank_of(int other) const { return ranks[static_cast<size_t>(other)]; }  ///< of a place
  int next() const { return rank_of((place + 1) % places()); }
  int before() const { return rank_of((place + places() - 1) % places()); }
};

/// Tensors [B, columns, K, D] of one shape but for the columns, which visit every place, all of a place in one message: m tensors, m u elements sent a step. In
/// use and on their way lie in two buffers (Comm), 2 m u elements, and none where the ring has one place. A step: pass_on(), use, advance().
class TravellingBlocks {
 public:
  TravellingBlocks(const Ring& ring, std::vector<at::Tensor> own);

  /// The block that is here; valid until advance().
  const at::Tensor& operator[](size_t tensor) const { return here_[tensor]; }
  void pass_on(const RingStep& step);
  /// Waits for the next step's block.
  void advance(const RingStep& step);

 private:
  at::Tensor view_of(size_t buffer, int block) const;

  const Ring& ring_;
  std::vector<at::Tensor> here_;
  std::array<at::Tensor, 2> memory_;
  at::Tensor sent_, coming_;
  size_t used_ = 0;
  comm::Exchange exchange_;
};

/// The sums of gradients [B, columns, K, D] fp32 of the block that is here, m tensors in one message. A step: begin(), add to the shares, end(). Memory (Comm):
/// 4 m u floats, m u where the ring has one place.
class TravellingSums {
 public:
  /// `like`: a tensor of this place's block.
  TravellingSums(const Ring& ring, size_t tensors, const at::Tensor& like);

  void begin(const RingStep& step);
  /// This place's share of the block's gradients: zeros at first.
  at::Tensor operator[](size_t tensor) const { return share_[static_cast<int64_t>(tensor)]; }
  /// Adds what has come, and sends the sum on; in the last step home, while the own one comes.
  void end(const RingStep& step);
  /// The whole gradients of this place's own block, after the `last` step.
  at::Tensor take(const RingStep& last);

 private:
  at::Tensor part_of(at::Tensor& memory, int block);

  const Ring& ring_;
  std::vector<int64_t> shape_;
  at::TensorOptions options_;
  at::Tensor own_, share_, coming_;
  std::array<at::Tensor, 2> shares_;
  at::Tensor incoming_;
  size_t used_ = 0;
  comm::Pending sent_, received_;
  comm::Exchange home_;
};

}  // namespace tessera::context
