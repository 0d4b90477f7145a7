#include "tessera/zero/flat_buckets.h"

#include <algorithm>
#include <utility>

#include <c10/core/GradMode.h>
#include <c10/core/TensorImpl.h>

#include "tessera/memory/memory.h"
#include "tessera/nn/flat_gradients.h"
#include "tessera/nn/part_storage.h"

// Parameters keep being the same tensors: their storage is exchanged in place, so optimizers, hooks and handles that a program has go on working, and an
// all-gather of updated parts writes where the model reads. Each parameter has a storage object of its own over the bucket's memory: if it is another one, the
// program has put other values there. The first reduce-scatter of a step writes straight into this rank's part, later ones leave their sum where this rank's
// own terms were and are added.

namespace tessera {
namespace {

/// Zeros what belongs to no slot.
void clear_padding(const at::Tensor& flat, const std::vector<ShardLayout::Slot>& slots) {
  int64_t end = 0;
  const auto clear_until = [&](int64_t next) {
    if (next > end) flat.narrow(0, end, next - end).zero_();
  };
  for (const auto& slot : slots) {
    clear_until(slot.offset);
    end = slot.offset + slot.numel;
  }
  clear_until(flat.numel());
}

/// Gives `tensor` the memory of `view`, in place: handles, hooks, slices and whoever else holds the tensor go along.
void move_into(const at::Tensor& tensor, const at::Tensor& view) {
  c10::TensorImpl* const impl = tensor.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(view.storage());
  impl->set_sizes_and_strides(view.sizes(), view.strides(), view.storage_offset());
}

}  // namespace

at::Tensor GradientMemory::take(int64_t numel, const at::TensorOptions& options) {
  const auto fits = std::ranges::find_if(spare_, [&](const at::Tensor& block) { return block.numel() >= numel && block.dtype() == options.dtype(); });
  if (fits != spare_.end()) {
    at::Tensor block = std::move(*fits);
    spare_.erase(fits);
    return block;
  }
  clear();  // before there is more
  const MemoryScope scope(MemoryCategory::Gradients);
  return comm::empty(group_, {numel}, options);
}

void GradientMemory::clear() {
  for (at::Tensor& block : spare_) release_scratch(block);
  spare_.clear();
}

FlatBucket::FlatBucket(const ShardLayout& layout, const ShardLayout::Bucket& bucket, const std::vector<nn::NamedParameter>& parameters,
                       const ShardGroups& groups, GradientForm form, GradientMemory& memory, SynchronizationStatistics& statistics)
    : bucket_(bucket),
      numel_(layout.numel(bucket)),
      group_(groups.shard),
      replicas_(groups.replicate),
      form_(form),
      memory_(&memory),
      statistics_(&statistics) {
  if (form_.network && (c10::isComplexType(form_.dtype) || c10::elementSize(*form_.network) >= c10::elementSize(form_.dtype))) form_.network.reset();
  for (const auto& slot : bucket_.slots) {
    tensors_.push_back(parameters[slot.parameter].tensor);
    sizes_.push_back(tensors_.back().sizes().vec());
  }
  gradient_options_ = tensors_.front().options().dtype(form_.dtype).requires_grad(false);
  move_parameters();
  if (!form_.passes_on && std::ranges::any_of(tensors_, [](const at::Tensor& tensor) { return tensor.requires_grad(); })) hold_part();
}

void FlatBucket::hold_part() {
  if (gradient_part_.defined()) return;
  if (form_.keeps_whole) {
    hold_gradients();
    gradient_part_ = part_of(gradients_);
  } else {
    const MemoryScope scope(MemoryCategory::Gradients);
    gradient_part_ = comm::empty(group_, {bucket_.part}, gradient_options_);
  }
}

void FlatBucket::move_parameters() {
  const c10::NoGradGuard no_grad;
  const MemoryScope scope(MemoryCategory::Parameters);
  parameters_ = comm::empty(group_, {numel_}, tensors_.front().options().requires_grad(false));
  clear_padding(parameters_, bucket_.slots);
  storages_.resize(tensors_.size());
  for (size_t i = 0; i < tensors_.size(); ++i) {
    take_parameter(i);
  }
}

at::Tensor FlatBucket::parameter_view(size_t slot) const {
  return parameters_.narrow(0, bucket_.slots[slot].offset, bucket_.slots[slot].numel).view(sizes_[slot]);
}

bool FlatBucket::is_replaced(size_t slot) const { return tensors_[slot].storage().unsafeGetStorageImpl() != storages_[slot].unsafeGetStorageImpl(); }

void FlatBucket::take_parameter(size_t slot) {
  const c10::NoGradGuard no_grad;
  const at::Tensor view = parameter_view(slot);
  if (storages_[slot]) nn::leave_to_aliases(storages_[slot], view);
  storages_[slot] = nn::part_storage(view);
  view.copy_(tensors_[slot]);
  move_into(tensors_[slot], nn::shown_through(storages_[slot], view));
}

void FlatBucket::hold_gradients() {
  if (gradients_.defined()) return;
  const c10::NoGradGuard no_grad;
  block_ = memory_->take(numel_, gradient_options_);
  gradients_ = block_.narrow(0, 0, numel_);
  clear_padding(gradients_, bucket_.slots);
  views_.clear();
  for (size_t i = 0; i < tensors_.size(); ++i) {
    views_.push_back(gradient_view(gradients_, bucket_.slots[i].offset, tensors_[i].sizes()));
  }
}

at::Tensor FlatBucket::place(size_t slot) {
  hold_gradients();
  return views_[slot];
}

bool FlatBucket::take_gradient(size_t slot) {
  hold_gradients();
  const bool leaves = !form_.keeps_whole && !form_.passes_on && is_place_awaited(tensors_[slot], views_[slot]);
  if (leaves) leave_places();
  recover_gradient(tensors_[slot], views_[slot]);
  return leaves;
}

/// Whoever computes a gradient in this memory keeps it, and may bring it later; what has come moves.
void FlatBucket::leave_places() {
  const std::vector<at::Tensor> left = std::exchange(views_, {});
  gradients_.reset();
  block_.reset();
  hold_gradients();
  for (size_t i = 0; i < tensors_.size(); ++i) {
    if (!tensors_[i].grad().is_same(left[i])) continue;
    views_[i].copy_(left[i]);
    set_gradient(tensors_[i], views_[i]);
  }
}

void FlatBucket::leave_out(size_t slot) {
  const c10::NoGradGuard no_grad;
  hold_gradients();
  views_[slot].zero_();
}

/// What `terms` are to be summed as, counted.
const at::Tensor& FlatBucket::crossing(const at::Tensor& terms, const comm::Group& group) {
  if (form_.network) narrow_.emplace(terms, *form_.network, group.size());
  const at::Tensor& crossing = narrow_ ? narrow_->crossing() : terms;
  statistics_->bytes += static_cast<int64_t>(crossing.nbytes());
  ++statistics_->num_collectives;
  return crossing;
}

void FlatBucket::start_reduce(bool add, bool last) {
  adding_ = add;
  last_ = last;
  hold_part();
  const at::Tensor whole = crossing(gradients_, group_);
  if (narrow_ && !form_.keeps_whole) release_gradients();
  // Of a first sum the result goes straight into this rank's part; a later one is made where this rank's own gradients lie, and added.
  reduction_ = comm::reduce_scatter_async(group_, narrow_ || add ? part_of(whole) : gradient_part_, whole);
}

bool FlatBucket::advance_reduce(const std::function<void()>& before_replicas) {
  const c10::NoGradGuard no_grad;
  std::exchange(reduction_, comm::Pending()).wait();
  // Two sums, one after the other: over the ranks that hold other parts, then over the replicas of this one.
  const bool was_across = std::exchange(across_, false);
  if (narrow_) {
    narrow_->store(was_across ? narrow_->crossing() : part_of(narrow_->crossing()), gradient_part_, adding_ && !was_across);
    narrow_->release();
    narrow_.reset();
  } else if (!was_across) {
    if (adding_) gradient_part_.add_(part_of(gradients_));
    if (!form_.keeps_whole) release_gradients();
  }
  if (was_across || !last_ || replicas_.size() == 1) return true;
  if (before_replicas) before_replicas();
  across_ = true;
  reduction_ = comm::all_reduce_async(replicas_, crossing(gradient_part_, replicas_));
  return false;
}

void FlatBucket::drop_reduce() {
  reduction_ = comm::Pending();
  across_ = false;
  narrow_.reset();
  views_.clear();
  gradients_.reset();
  block_.reset();
  gradient_part_.reset();
}

void FlatBucket::release_gradients() {
  views_.clear();
  gradients_.reset();
  memory_->give_back(std::exchange(block_, {}));
}

}  // namespace tessera
