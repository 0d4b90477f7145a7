#include "tessera/context_parallel/travel.h"

#include <algorithm>
#include <utility>

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include "tessera/memory/memory.h"

// A message is in flight while the same step is computed, so what is sent, what comes and what is computed on are three different memories or read-only. The
// sum of a block is posted for before the next block: that is the order in which the place before sends them. The last sums go straight home, each place's
// while its own comes: one exchange, in which places that send to each other must not both begin with the send.

namespace tessera::context {

namespace {

constexpr int kBlockTag = 1, kSumTag = 2;

/// Room for `tensors` of any place's block.
at::Tensor room(const Ring& ring, int64_t tensors, std::vector<int64_t> shape, const at::TensorOptions& options) {
  shape[1] = std::ranges::max(ring.columns);
  const MemoryScope scratch(MemoryCategory::Comm);
  return at::empty({tensors * c10::multiply_integers(shape)}, options);
}

at::Tensor view_of_room(const at::Tensor& memory, int64_t tensors, std::vector<int64_t> shape, int64_t columns) {
  shape[1] = columns;
  shape.insert(shape.begin(), tensors);
  return memory.narrow(0, 0, c10::multiply_integers(shape)).view(shape);
}

}  // namespace

TravellingBlocks::TravellingBlocks(const Ring& ring, std::vector<at::Tensor> own) : ring_(ring), here_(std::move(own)) {}

void TravellingBlocks::pass_on(const RingStep& step) {
  if (!step.keys_go_on) return;
  const auto tensors = static_cast<int64_t>(here_.size());
  const auto shape = here_.front().sizes().vec();
  for (at::Tensor& memory : memory_) {
    if (!memory.defined()) memory = room(ring_, tensors, shape, here_.front().options());
  }
  if (!sent_.defined()) {  // the own block, which is where its owner has it
    sent_ = view_of_room(memory_[used_], tensors, shape, ring_.columns[static_cast<size_t>(ring_.place)]);
    for (int64_t i = 0; i < tensors; ++i) sent_[i].copy_(here_[static_cast<size_t>(i)]);
  }
  const int next_block = (step.block + ring_.places() - 1) % ring_.places();
  coming_ = view_of_room(memory_[1 - used_], tensors, shape, ring_.columns[static_cast<size_t>(next_block)]);
  exchange_ = comm::exchange_async(ring_.group, sent_, ring_.next(), coming_, ring_.before(), kBlockTag, comm::receives_first(ring_.place));
  if (!ring_.overlap) exchange_.wait();
}

void TravellingBlocks::advance(const RingStep& step) {
  if (!step.keys_go_on) return;
  exchange_.wait();
  used_ = 1 - used_;
  sent_ = coming_;
  for (size_t i = 0; i < here_.size(); ++i) here_[i] = sent_[static_cast<int64_t>(i)];
}

TravellingSums::TravellingSums(const Ring& ring, size_t tensors, const at::Tensor& like)
    : ring_(ring), shape_(like.sizes().vec()), options_(like.options().dtype(at::kFloat)) {
  auto shape = shape_;
  shape.insert(shape.begin(), static_cast<int64_t>(tensors));
  own_ = at::zeros(shape, options_);
}

at::Tensor TravellingSums::part_of(at::Tensor& memory, int block) {
  if (!memory.defined()) memory = room(ring_, own_.size(0), shape_, options_);
  return view_of_room(memory, own_.size(0), shape_, ring_.columns[static_cast<size_t>(block)]);
}

void TravellingSums::begin(const RingStep& step) {
  if (step.block == ring_.place) {
    share_ = own_;
    return;
  }
  if (step.sum_comes) {
    coming_ = part_of(incoming_, step.block);
    received_ = comm::recv_async(ring_.group, coming_, ring_.before(), kSumTag);
  }
  share_ = part_of(shares_[used_], step.block).zero_();
}

void TravellingSums::end(const RingStep& step) {
  if (step.sum_comes) {
    received_.wait();
    share_.add_(coming_);
  }
  if (!step.sum_goes_on) return;
  sent_.wait();  // the other share's memory is the next step's
  if (step.own_comes_from < 0) {
    sent_ = comm::send_async(ring_.group, share_, ring_.rank_of(step.sum_to), kSumTag);
  } else {
    coming_ = part_of(incoming_, ring_.place);
    const int hops = (step.own_comes_from + ring_.places() - ring_.place) % ring_.places();
    home_ = comm::exchange_async(ring_.group, share_, ring_.rank_of(step.sum_to), coming_, ring_.rank_of(step.own_comes_from), kSumTag,
                                 comm::receives_first(ring_.place, hops));
  }
  used_ = 1 - used_;
}

at::Tensor TravellingSums::take(const RingStep& last) {
  if (last.own_comes_from >= 0) {
    home_.wait();
    own_.add_(coming_);
  }
  return own_;
}

}  // namespace tessera::context
