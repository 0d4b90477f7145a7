#include "tessera/fsdp/flat_parameters.h"

#include <algorithm>
#include <utility>

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>
#include <c10/core/StorageImpl.h>

#include "tessera/core/error.h"
#include "tessera/memory/memory.h"
#include "tessera/nn/flat_gradients.h"
#include "tessera/nn/kept_memory.h"
#include "tessera/nn/meta.h"
#include "tessera/nn/not_repeated.h"
#include "tessera/nn/part_storage.h"

// A parameter is one tensor with two faces: its implementation is pointed now at this rank's slice, now at its place in the unit's whole buffer. No version
// counter moves, so autograd sees no write. The whole buffer is one storage object for life, which is given memory and deprived of it: the views that autograd
// saved in forward share it, and are whole again in backward without anybody knowing of them. Read while it is empty, it answers with a sentence and not with
// garbage. Where cuts are even a part is sent from where it lies and received where it is used; uneven cuts and casts cost a copy, and so does a gradient that
// was not computed in its place in the unit's buffer.

namespace tessera {
namespace {

at::Tensor allocate_flat(int64_t size, at::TensorOptions options, MemoryCategory category) {
  const MemoryScope scope(category);
  return at::empty({size}, options.requires_grad(false));
}

/// Slices stay for the run and are gathered again and again: in memory that the engine need not stage, where it has such memory.
at::Tensor allocate_slices(const comm::Group& group, int64_t size, at::TensorOptions options, const HostLink* host) {
  const MemoryScope scope(MemoryCategory::Parameters);
  if (host) return host->empty(size, c10::typeMetaToScalarType(options.dtype()));
  return comm::empty(group, {size}, options.requires_grad(false));
}

/// A flat tensor whose storage has its size and no memory yet.
at::Tensor flat_without_memory(int64_t size, at::TensorOptions options) {
  at::Tensor flat = at::empty({0}, options.requires_grad(false));
  const size_t bytes = static_cast<size_t>(size) * c10::elementSize(c10::typeMetaToScalarType(options.dtype()));
  auto* impl = flat.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(
      at::Storage(c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), bytes, at::DataPtr(nullptr, flat.device()),
                                                        /*allocator=*/nullptr, /*resizable=*/false)));
  impl->set_sizes_and_strides(at::IntArrayRef{size}, at::IntArrayRef{1});
  return flat;
}

/// Points `tensor` at `view`'s memory, shape and dtype, in place: handles, hooks and optimizers that hold it keep working, and no version counter moves.
void point_at(const at::Tensor& tensor, const at::Tensor& view) {
  auto* impl = tensor.unsafeGetTensorImpl();
  if (tensor.device() != view.device()) impl->_change_backend_component_keys(view.device());
  impl->set_storage_and_dtype(view.storage(), view.dtype());
  impl->set_sizes_and_strides(view.sizes(), view.strides(), view.storage_offset());
}

/// What `make` makes of views, as tensors of their own as far as autograd knows: it would refuse to detach a view in place, which optimizers do.
template <class Make>
at::Tensor no_view(Make&& make) {
  const at::AutoDispatchBelowADInplaceOrView below;
  return make();
}

at::Tensor entry_view(const at::Tensor& flat, const UnitLayout::Entry& entry) { return flat.narrow(0, entry.offset, entry.numel).view(entry.shape); }

}  // namespace

FlatParameters::FlatParameters(std::vector<nn::NamedParameter> parameters, comm::Group group, Dtypes dtypes, at::Device device, const Beside& beside)
    : parameters_(std::move(parameters)),
      group_(std::move(group)),
      dtypes_(dtypes),
      host_(beside.host),
      file_(beside.file),
      trained_(parameters_.front().tensor.requires_grad()) {
  std::vector<std::vector<int64_t>> shapes;
  for (const auto& parameter : parameters_) shapes.push_back(parameter.tensor.sizes().vec());
  layout_ = make_unit_layout(shapes, group_.size());
  arrivals_.assign(parameters_.size(), Arrival::None);
  const at::Tensor& first = parameters_.front().tensor;
  const auto options = first.options().device(first.is_meta() ? device : first.device());
  if (file_) {
    filed_ = file_->make(layout_.part, first.scalar_type());
    slices_ = filed_->tensor();
  } else {
    slices_ = allocate_slices(group_, layout_.part, options, host_.get());
  }
  whole_ = flat_without_memory(layout_.size, options.dtype(dtypes_.gathered));
  for (const UnitLayout::Entry& entry : layout_.parameters) {
    whole_views_.push_back(no_view([&] { return entry_view(whole_, entry); }));
  }
  cut();
}

void FlatParameters::cut() {
  const at::NoGradGuard no_grad;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    const at::Tensor& parameter = parameters_[i].tensor;
    before_.push_back(nn::slice_of(parameter));
    Slice slice = slice_on(group_.rank(), i);
    const at::Tensor rows = local_rows(slices_, i);
    slice_sizes_.push_back(rows.sizes().vec());
    slice_storages_.push_back(nn::part_storage(rows));
    if (!parameter.is_meta()) keep_rows(i, parameter.detach());
    nn::set_slice(parameter, cut_.emplace_back(std::move(slice)));
    nn::keep_memory(parameter);
    nn::keep_beside(parameter, host_ != nullptr);
  }
  show_slices();
}

Slice FlatParameters::slice_on(int rank, size_t index) const {
  const auto [first, count] = rows_of(layout_, index, rank);
  Slice slice = cut_rows(before_[index], first, count);
  slice.name = parameters_[index].name;
  return slice;
}

/// This rank's rows of `whole` -> its slice of parameter `index`.
void FlatParameters::keep_rows(size_t index, const at::Tensor& whole) const {
  const auto [first, count] = rows_of(layout_, index, group_.rank());
  const at::Tensor rows = local_rows(slices_, index);
  rows.copy_(whole.dim() == 0 ? whole.reshape({1}).narrow(0, 0, count).view(rows.sizes()) : whole.narrow(0, first, count));
}

bool FlatParameters::is_replaced() const {
  for (size_t i = 0; i < parameters_.size(); ++i) {
    if (is_replaced(i)) return true;
  }
  return false;
}

bool FlatParameters::is_replaced(size_t index) const {
  const c10::StorageImpl* const storage = parameters_[index].tensor.storage().unsafeGetStorageImpl();
  return storage != whole_storage() && storage != slice_storage(index);
}

void FlatParameters::take_in(size_t limit) {
  const at::NoGradGuard no_grad;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    const auto& [name, parameter, aliases] = parameters_[i];
    if (!is_replaced(i)) continue;
    const at::IntArrayRef whole = layout_.parameters[i].shape, slice = slice_sizes_[i];
    const at::Tensor given = parameter.detach();
    require(given.scalar_type() == slices_.scalar_type() || given.scalar_type() == dtypes_.gathered, "fully_shard: '", name, "' was given a tensor of type ",
            given.scalar_type(), " after it was wrapped, where its slices are ", slices_.scalar_type(),
            "; convert the model before fully_shard, or what is loaded");
    require(given.sizes() == whole || given.sizes() == slice, "fully_shard: '", name, "' was given a tensor of shape ", given.sizes(),
            " after it was wrapped; load the whole, ", whole, ", or this rank's slice, ", slice);
    require(given.sizes() == whole || given.storage().nbytes() <= limit, "fully_shard: '", name, "' was given a part of ", given.storage().nbytes(),
            " bytes, while all slices of this rank have ", limit,
            ": a vector of whole parameters does not fit slices (vector_to_parameters); load whole tensors one by one, before fully_shard or after");
    std::erase(given_slices_, i);
    nn::restore_known(parameter);  // set_data takes over what the other tensor says of itself
    nn::set_slice(parameter, cut_[i]);
    nn::keep_memory(parameter);
    nn::note_given(parameter);
    nn::keep_beside(parameter, host_ != nullptr);
    brought_.wait();  // a copy to the device may still read what is written here
    drop_read();
    const at::Tensor rows = local_rows(slices_, i);
    nn::leave_to_aliases(slice_storages_[i], rows);
    slice_storages_[i] = nn::part_storage(rows);
    if (given.sizes() == whole) {
      keep_rows(i, given);
      continue;
    }
    rows.copy_(given);
    given_slices_.push_back(i);
  }
}

/// torch::save of one rank's sharded module keeps its slices; torch::load of that file on every rank fits wherever cuts are even, and is another model.
void FlatParameters::refuse_one_ranks_slices(const at::Tensor& whole) {
  if (whole.is_meta() || layout_.ranks == 1) return;
  for (const size_t i : given_slices_) {
    const UnitLayout::Entry& entry = layout_.parameters[i];
    if (entry.numel == 0 || elements_of(layout_, i, 0) * layout_.ranks != entry.numel) continue;
    const at::Tensor values = whole.narrow(0, entry.offset, entry.numel);
    const at::Tensor parts = values.view({layout_.ranks, -1}), first = parts.narrow(0, 0, 1);
    const bool constant = values.eq(values[0]).all().item<bool>();  // biases of zero are alike on all ranks
    require(constant || !parts.eq(first).all().item<bool>(), "fully_shard: '", parameters_[i].name,
            "' was given the same rows on every rank after it was wrapped: a file that torch::save made of one rank's sharded module holds that rank's slices; "
            "save by checkpoint::save, or after unshard(model)");
  }
  given_slices_.clear();  // behind the last refusal: until other values are loaded, it is refused again
}

void FlatParameters::follow_requires_grad(bool too) {
  trained_ = (too && trained_) || std::ranges::any_of(parameters_, [](const nn::NamedParameter& parameter) { return parameter.tensor.requires_grad(); });
}

at::Tensor FlatParameters::slice_view(size_t index) const {
  return nn::shown_through(slice_storages_[index], no_view([&] { return local_rows(slices_, index); }));
}

std::optional<size_t> FlatParameters::find_whole(const at::Tensor& whole) const {
  if (whole.storage().unsafeGetStorageImpl() != whole_storage() || !whole.is_contiguous()) return std::nullopt;
  for (size_t i = 0; i < layout_.parameters.size(); ++i) {
    const UnitLayout::Entry& entry = layout_.parameters[i];
    if (entry.offset == whole.storage_offset() && whole.sizes() == at::IntArrayRef(entry.shape)) return i;
  }
  return std::nullopt;
}

void FlatParameters::set_complaint(std::string text) {
  complaint_ = std::move(text);
  release();
}

int64_t FlatParameters::gathered_bytes() const { return layout_.size * static_cast<int64_t>(c10::elementSize(dtypes_.gathered)); }
int64_t FlatParameters::reduced_bytes() const { return layout_.size * static_cast<int64_t>(c10::elementSize(dtypes_.reduced)); }
int64_t FlatParameters::local_bytes() const { return static_cast<int64_t>(slices_.nbytes()); }

int64_t FlatParameters::tied_bytes() const {
  int64_t bytes = 0;
  for (size_t i = 0; i < parameters_.size(); ++i) bytes += static_cast<int64_t>(parameters_[i].aliases.size() * local_rows(slices_, i).nbytes());
  return bytes;
}

at::Tensor FlatParameters::local_rows(const at::Tensor& flat, size_t index) const {
  const UnitLayout::Entry& entry = layout_.parameters[index];
  const int64_t own = layout_.begin[group_.rank()];
  const auto [first, count] = rows_of(layout_, index, group_.rank());
  if (entry.shape.empty()) return count > 0 ? flat.narrow(0, entry.offset - own, 1).view(at::IntArrayRef()) : flat.narrow(0, 0, 0);
  std::vector<int64_t> shape = entry.shape;
  const int64_t row = shape[0] > 0 ? entry.numel / shape[0] : 0;
  shape[0] = count;
  return flat.narrow(0, count > 0 ? entry.offset + first * row - own : 0, count * row).view(shape);
}

void FlatParameters::show_slices() {
  brought_.wait();  // whoever sees the slices may write them
  brought_ = {};
  cast_.reset();
  drop_read();
  for (size_t i = 0; i < parameters_.size(); ++i) point_at(parameters_[i].tensor, slice_view(i));
}

void FlatParameters::show_whole() {
  for (size_t i = 0; i < parameters_.size(); ++i) point_at(parameters_[i].tensor, entry_view(whole_, layout_.parameters[i]));
}

void FlatParameters::allocate() {
  const at::Tensor memory = allocate_flat(layout_.size, whole_.options(), MemoryCategory::Comm);
  auto* const storage = whole_.storage().unsafeGetStorageImpl();
  storage->clear_data_ptr_access_error_msg_();
  storage->set_data_ptr(memory.storage().unsafeGetStorageImpl()->set_data_ptr(at::DataPtr(nullptr, whole_.device())));
}

void FlatParameters::release() {
  auto* const storage = whole_.storage().unsafeGetStorageImpl();
  storage->set_data_ptr(at::DataPtr(nullptr, whole_.device()));
  if (!complaint_.empty() && !whole_.is_meta()) storage->release_data_and_set_meta_custom_data_ptr_error_msg_(complaint_);
}

void FlatParameters::unshard() {
  const at::NoGradGuard no_grad;
  at::Tensor whole;
  {
    const MemoryScope scope(MemoryCategory::Comm);
    const auto options = whole_.options().dtype(slices_.scalar_type());
    const at::Tensor parts = at::empty({layout_.ranks * layout_.part}, options);
    comm::all_gather(group_, parts, slices_.to(options.device()));
    whole = parts;
    if (!layout_.even) {
      whole = at::empty({layout_.size}, options);
      unpad(parts, whole);
    }
  }
  refuse_one_ranks_slices(whole);
  const MemoryScope scope(MemoryCategory::Parameters);
  for (size_t i = 0; i < parameters_.size(); ++i) {
    const at::Tensor& parameter = parameters_[i].tensor;
    set_gradient(parameter, {});
    point_at(parameter, entry_view(whole, layout_.parameters[i]).clone());
    nn::set_slice(parameter, before_[i]);
    nn::keep_beside(parameter, false);
    nn::keep_memory(parameter, false);
  }
}

void FlatParameters::begin_read() {
  if (!file_ || read_.defined()) return;
  const MemoryScope scope(MemoryCategory::Comm);
  read_ = host_->empty(layout_.part, slices_.scalar_type());
  filed_->begin_copy(read_);
}

/// Its memory is gone when this returns, and not at some time later.
void FlatParameters::drop_read() {
  if (!read_.defined()) return;
  filed_->await_copy();
  read_.reset();
}

void FlatParameters::let_go() {
  if (filed_) filed_->let_go();
  for (const auto& filed : filed_gradients_) filed->let_go();
}

at::Tensor FlatParameters::read_slices() {
  begin_read();
  filed_->await_copy();
  const at::Tensor slices = std::exchange(read_, {});
  if (dtypes_.gathered == slices.scalar_type()) return slices;
  const MemoryScope scope(MemoryCategory::Comm);
  const at::Tensor cast = host_->empty(layout_.part, dtypes_.gathered);
  cast.copy_(slices);
  return cast;
}

/// On the host, in the type that is gathered: cast once while parameters are whole, so that each copy moves no more than the device needs.
at::Tensor FlatParameters::sendable_slices() {
  if (file_) return read_slices();
  if (dtypes_.gathered == slices_.scalar_type()) return slices_;
  if (!cast_.defined()) {
    const MemoryScope scope(MemoryCategory::Comm);
    cast_ = host_->empty(layout_.part, dtypes_.gathered);
    cast_.copy_(slices_);
  }
  return cast_;
}

void FlatParameters::start_gather() {
  const nn::NotRepeated gathering;  // when a unit is brought is the step's to say, and its scratch is given back before backward
  allocate();
  const MemoryScope scope(MemoryCategory::Comm);
  if (!layout_.even) received_ = at::empty({layout_.ranks * layout_.part}, whole_.options());
  const at::Tensor& gathered = layout_.even ? whole_ : received_;
  if (!host_) {
    sent_ = dtypes_.gathered == slices_.scalar_type() ? slices_ : slices_.to(dtypes_.gathered);
    gather_ = comm::all_gather_async(group_, gathered, sent_);
    return;
  }
  // The collective follows the copy's stream, not the one that computes, which goes on beside both.
  const at::Tensor slices = sendable_slices();
  const CopyStream::Scope copying(host_->in);
  sent_ = gathered.narrow(0, group_.rank() * layout_.part, layout_.part);
  sent_.copy_(slices, /*non_blocking=*/true);
  brought_ = host_->in.point();
  if (group_.size() > 1) gather_ = comm::all_gather_async(group_, gathered, sent_);
}

void FlatParameters::finish_gather() {
  gather_.wait();
  gather_ = {};
  brought_.hold_device();
  if (received_.defined()) {
    unpad(received_, whole_);
    release_scratch(received_);
  }
  if (!host_ && sent_.defined() && !sent_.is_same(slices_)) release_scratch(sent_);
  sent_.reset();
}

void FlatParameters::unpad(const at::Tensor& parts, const at::Tensor& whole) const {
  if (parts.is_meta()) return;  // a dry run of many ranks
  for (int rank = 0; rank < layout_.ranks; ++rank) {
    const int64_t size = layout_.begin[rank + 1] - layout_.begin[rank];
    whole.narrow(0, layout_.begin[rank], size).copy_(parts.narrow(0, rank * layout_.part, size));
  }
}

at::Tensor FlatParameters::padded(const at::Tensor& whole) const {
  at::Tensor parts = at::zeros({layout_.ranks * layout_.part}, whole.options());
  if (parts.is_meta()) return parts;
  for (int rank = 0; rank < layout_.ranks; ++rank) {
    const int64_t size = layout_.begin[rank + 1] - layout_.begin[rank];
    parts.narrow(0, rank * layout_.part, size).copy_(whole.narrow(0, layout_.begin[rank], size));
  }
  return parts;
}

void FlatParameters::keep_slices() {
  const at::NoGradGuard no_grad;
  const int64_t own = layout_.begin[group_.rank()], size = layout_.begin[group_.rank() + 1] - own;
  slices_.narrow(0, 0, size).copy_(whole_.narrow(0, own, size));
}

void FlatParameters::hold_gradients() {
  if (whole_gradients_.defined()) return;
  whole_gradients_ = allocate_flat(layout_.size, whole_.options().dtype(dtypes_.summed), MemoryCategory::Comm);
  std::ranges::fill(arrivals_, Arrival::None);
}

bool FlatParameters::offers_place(size_t index) const {
  return dtypes_.gathered == dtypes_.summed && (!whole_gradients_.defined() || arrivals_[index] == Arrival::None);
}

at::Tensor FlatParameters::place(size_t index) {
  hold_gradients();
  arrivals_[index] = Arrival::InPlace;
  return entry_view(whole_gradients_, layout_.parameters[index]);
}

/// Whether somebody has a place in the buffer, and still holds it: its gradient may come, and nothing else may be written there.
bool FlatParameters::is_place_awaited() const {
  return std::ranges::find(arrivals_, Arrival::InPlace) != arrivals_.end() && whole_gradients_.storage().use_count() > 1;
}

/// Whoever computes in the buffer keeps that memory; what has come moves.
void FlatParameters::leave_places() {
  const at::Tensor left = std::exchange(whole_gradients_, {});
  const std::vector<Arrival> before = arrivals_;
  hold_gradients();
  for (size_t i = 0; i < before.size(); ++i) {
    if (before[i] != Arrival::Taken) continue;
    entry_view(whole_gradients_, layout_.parameters[i]).copy_(entry_view(left, layout_.parameters[i]));
    arrivals_[i] = Arrival::Taken;
  }
}

void FlatParameters::take_up(size_t index, const at::Tensor& gradient) {
  const at::NoGradGuard no_grad;
  hold_gradients();
  if (arrivals_[index] == Arrival::InPlace) {
    const bool is_there = occupies(gradient, entry_view(whole_gradients_, layout_.parameters[index]));
    if (!is_there && is_place_awaited()) leave_places();  // another gradient came first
    arrivals_[index] = is_there ? Arrival::Taken : Arrival::None;
    if (is_there) return;
  }
  const at::Tensor target = entry_view(whole_gradients_, layout_.parameters[index]);
  if (std::exchange(arrivals_[index], Arrival::Taken) == Arrival::Taken) {
    target.add_(gradient);
  } else {
    target.copy_(gradient);
  }
}

void FlatParameters::forget(size_t index) {
  if (whole_gradients_.defined() && arrivals_[index] == Arrival::Taken) arrivals_[index] = Arrival::None;
}

/// Gaps, and gradients that nobody brought.
void FlatParameters::zero_untouched() {
  std::vector<std::pair<int64_t, int64_t>> touched{{layout_.size, layout_.size}};  // [begin, end)
  for (size_t i = 0; i < parameters_.size(); ++i) {
    const UnitLayout::Entry& entry = layout_.parameters[i];
    if (arrivals_[i] == Arrival::Taken) touched.emplace_back(entry.offset, entry.offset + entry.numel);
  }
  std::ranges::sort(touched);
  int64_t end = 0;
  for (const auto& [begin, next] : touched) {
    if (begin > end) whole_gradients_.narrow(0, end, begin - end).zero_();
    end = std::max(end, next);
  }
}

void FlatParameters::start_reduction(double scale) {
  const at::NoGradGuard no_grad;
  finish_return();
  hold_gradients();
  if (is_place_awaited()) leave_places();
  zero_untouched();
  sent_gradients_ = std::exchange(whole_gradients_, {});
  if (scale != 1 && scales_terms()) sent_gradients_.mul_(scale);
  if (dtypes_.summed != dtypes_.reduced) {
    const MemoryScope scope(MemoryCategory::Comm);
    at::Tensor sum = std::exchange(sent_gradients_, sent_gradients_.to(dtypes_.reduced));
    release_scratch(sum);
  }
  if (!layout_.even) {
    const MemoryScope scope(MemoryCategory::Comm);
    at::Tensor whole = std::exchange(sent_gradients_, padded(sent_gradients_));
    release_scratch(whole);
  }
  if (host_ && group_.size() == 1) {  // its own sum
    summed_ = std::exchange(sent_gradients_, {});
    return;
  }
  summed_ = allocate_flat(layout_.part, sent_gradients_.options(), host_ ? MemoryCategory::Comm : MemoryCategory::Gradients);
  reduction_ = comm::reduce_scatter_async(group_, summed_, sent_gradients_);
}

void FlatParameters::finish_reduction() {
  if (!summed_.defined()) return;
  const at::NoGradGuard no_grad;
  reduction_.wait();
  reduction_ = {};
  if (sent_gradients_.defined()) release_scratch(sent_gradients_);
  if (!host_) add_to_slices();
}

/// The reduced slice in the type that is kept.
void FlatParameters::convert_sum(MemoryCategory category) {
  if (summed_.scalar_type() == dtypes_.kept) return;
  const MemoryScope scope(category);
  at::Tensor before = std::exchange(summed_, summed_.to(dtypes_.kept));
  release_scratch(before);
}

/// Where the slices lie.
void FlatParameters::add_to_slices() {
  const HostMemory beside(host_ != nullptr);
  convert_sum(MemoryCategory::Gradients);
  if (local_gradients_.defined()) {
    local_gradients_.add_(summed_);
    release_scratch(summed_);
  } else if (file_) {
    keep_sum();
  } else {
    local_gradients_ = std::exchange(summed_, {});
  }
  for (const auto& filed : filed_gradients_) filed->let_go();
}

/// The first of a reduction, in the file: where nobody holds what lies there, for the gradients that a pass adds to are those of the pass before.
void FlatParameters::keep_sum() {
  const auto is_free = [](const auto& filed) { return filed->tensor().storage().use_count() == 1; };
  auto place = std::ranges::find_if(filed_gradients_, is_free);
  if (place == filed_gradients_.end()) place = filed_gradients_.insert(place, file_->make(layout_.part, summed_.scalar_type()));
  local_gradients_ = (*place)->tensor();
  local_gradients_.copy_(summed_);
  release_scratch(summed_);
}

/// Adds what waits on the host of earlier micro-batches to what has been reduced, on the device, where replicas can add it up.
void FlatParameters::add_to_waiting() {
  convert_sum(MemoryCategory::Comm);
  if (!local_gradients_.defined()) return;
  const MemoryScope scope(MemoryCategory::Comm);
  const at::Tensor waiting = at::empty_like(summed_);
  {
    const CopyStream::Scope copying(host_->in);
    waiting.copy_(std::exchange(local_gradients_, {}), /*non_blocking=*/true);
  }
  host_->in.point().hold_device();
  waiting.add_(summed_);
  release_scratch(summed_);
  summed_ = waiting;
}

void FlatParameters::start_replica_sum(const comm::Group& replicas) {
  const at::NoGradGuard no_grad;
  if (host_) add_to_waiting();
  const at::Tensor& mine = host_ ? summed_ : local_gradients_;
  if (dtypes_.reduced != dtypes_.kept) {
    const MemoryScope scope(MemoryCategory::Comm);
    crossing_ = mine.to(dtypes_.reduced);
  }
  reduction_ = comm::all_reduce_async(replicas, crossing_.defined() ? crossing_ : mine);
}

void FlatParameters::start_return() {
  if (!host_ || !summed_.defined()) return;
  const at::NoGradGuard no_grad;
  const MemoryScope scope(MemoryCategory::Gradients);
  arrived_ = host_->empty(layout_.part, summed_.scalar_type());
  const CopyStream::Scope copying(host_->out);
  arrived_.copy_(summed_, /*non_blocking=*/true);
  return_ = host_->out.point();
}

void FlatParameters::finish_return() {
  if (!host_ || !summed_.defined()) return;
  const at::NoGradGuard no_grad;
  reduction_.wait();
  reduction_ = {};
  if (crossing_.defined()) {
    summed_.copy_(crossing_);
    release_scratch(crossing_);
  }
  if (!arrived_.defined()) start_return();
  return_.wait();
  return_ = {};
  release_scratch(summed_);
  summed_ = std::exchange(arrived_, {});
  add_to_slices();
}

void FlatParameters::finish_step(double scale) {
  finish_return();
  reduction_.wait();
  reduction_ = {};
  if (crossing_.defined()) {
    local_gradients_.copy_(crossing_);
    release_scratch(crossing_);
  }
  if (scale != 1 && !scales_terms()) local_gradients_.mul_(scale);
}

at::Tensor FlatParameters::local_gradient(size_t index) const {
  if (!local_gradients_.defined()) return {};
  return no_view([&] { return local_rows(local_gradients_, index); });
}

void FlatParameters::clear_sums() {
  finish_return();
  reduction_.wait();
  reduction_ = {};
  whole_gradients_.reset();
  local_gradients_.reset();
}

}  // namespace tessera
