#include "tessera/tensor_parallel/overlap_ring.h"

#include <ATen/ops/empty.h>

#include "tessera/core/error.h"
#include "tessera/layout/slice.h"
#include "tessera/memory/memory.h"

// Point-to-point steps and not one all-gather: a part can be used as soon as it is there. What is in use and what is on its way never share memory, so two
// buffers alternate, and waiting for the send as well as the receive is what makes the older one free. In the sum, the part that ends here was begun by the
// next rank and has passed all others; so each term is needed only when the sum so far arrives, and computing it hides the step.

namespace tessera::tensor_parallel {
namespace {

/// Both kinds of ring may be under way between the same two ranks.
constexpr int kGatherTag = 1, kSumTag = 2;

/// The rank `steps` before this one.
int before(const comm::Group& group, int steps) { return (group.rank() - steps % group.size() + group.size()) % group.size(); }

/// Starts sending `out` to the next rank and receiving `in` from the one before.
comm::Exchange start_exchange(const comm::Group& group, int tag, const at::Tensor& out, const at::Tensor& in) {
  return comm::exchange_async(group, out, before(group, group.size() - 1), in, before(group, 1), tag, comm::receives_first(group.rank()));
}

/// Memory for any part of `whole`, of `options`.
at::Tensor part_memory(std::vector<int64_t> whole, int ranks, const at::TensorOptions& options) {
  whole[1] = chunk(whole[1], ranks, 0).second;
  const MemoryScope scratch(MemoryCategory::Comm);
  return at::empty({c10::multiply_integers(whole)}, options);
}

at::Tensor view_of(const at::Tensor& memory, std::vector<int64_t> shape, int64_t positions) {
  shape[1] = positions;
  return memory.narrow(0, 0, c10::multiply_integers(shape)).view(shape);
}

}  // namespace

GatherRing::GatherRing(comm::Group group, const at::Tensor& own, int64_t positions) : group_(std::move(group)), positions_(positions), part_(own) {
  const int64_t expected = span().second;
  invariant(own.size(1) == expected, "a part of ", own.size(1), " positions is not this rank's ", expected, " of ", positions);
  exchange();
}

std::pair<int64_t, int64_t> GatherRing::span() const { return chunk(positions_, group_.size(), before(group_, step_)); }

void GatherRing::exchange() {
  if (step_ + 1 >= group_.size()) return;
  auto whole = part_.sizes().vec();
  whole[1] = positions_;
  at::Tensor& memory = memory_[static_cast<size_t>(step_ % 2)];
  if (!memory.defined()) memory = part_memory(whole, group_.size(), part_.options());
  next_ = view_of(memory, whole, chunk(positions_, group_.size(), before(group_, step_ + 1)).second);
  exchange_ = start_exchange(group_, kGatherTag, part_, next_);
}

void GatherRing::advance() {
  exchange_.wait();  // what it sent from is overwritten by the next one
  part_ = std::move(next_);
  ++step_;
  exchange();
}

SumRing::SumRing(comm::Group group, std::vector<int64_t> whole, const at::TensorOptions& options)
    : group_(std::move(group)), whole_(std::move(whole)), options_(options) {
  begin_term();
}

std::pair<int64_t, int64_t> SumRing::span() const { return chunk(whole_[1], group_.size(), before(group_, step_ + 1)); }

at::Tensor SumRing::part_of(const at::Tensor& memory) const { return view_of(memory, whole_, span().second); }

void SumRing::begin_term() {
  if (step_ + 1 == group_.size()) {  // its own: the result
    auto shape = whole_;
    shape[1] = span().second;
    term_ = at::empty(shape, options_);
    return;
  }
  at::Tensor& memory = memory_[static_cast<size_t>(step_ % 2)];
  if (!memory.defined()) memory = part_memory(whole_, group_.size(), options_);
  term_ = part_of(memory);
}

void SumRing::pass_on() {
  if (step_ > 0) {
    exchange_.received.wait();
    term_.add_(part_of(incoming_));
  }
  exchange_.sent.wait();  // its memory is the next term's
  if (++step_ == group_.size()) return;
  if (!incoming_.defined()) incoming_ = part_memory(whole_, group_.size(), options_);
  exchange_ = start_exchange(group_, kSumTag, term_, part_of(incoming_));
  begin_term();
}

}  // namespace tessera::tensor_parallel
