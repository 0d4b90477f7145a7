#include "tessera/offload/parked_storage.h"

#include <utility>

#include <ATen/ops/empty.h>

#include "tessera/core/error.h"
#include "tessera/memory/memory.h"

namespace tessera::offload {

namespace {

constexpr size_t kWrites = 2;  ///< under way at a time: one is written while the next arrives

/// All bytes of the storage, as they are: a tensor whose numbers are negated or conjugated as they are read says so by its keys.
at::Tensor bytes_of(const at::Tensor& tensor) {
  const c10::DispatchKeySet keys = tensor.key_set() - c10::DispatchKeySet({c10::DispatchKey::Negative, c10::DispatchKey::Conjugate});
  at::Tensor bytes = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(tensor.storage()), keys, caffe2::TypeMeta::Make<uint8_t>());
  bytes.unsafeGetTensorImpl()->set_sizes_contiguous({static_cast<int64_t>(tensor.storage().nbytes())});
  return bytes;
}

}  // namespace

void Depot::await_write(SpillFile::Ticket ticket, at::Tensor staged) {
  writing_.push_back({ticket, std::move(staged)});
  while (writing_.size() > kWrites) {
    file->wait(writing_.front().ticket);
    writing_.pop_front();
  }
}

ParkedStorage::ParkedStorage(std::shared_ptr<Depot> depot, const at::Tensor& tensor, bool on_disk)
    : depot_(std::move(depot)),
      storage_(c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(tensor.storage().unsafeGetStorageImpl())),
      writes_(tensor.unsafeGetTensorImpl()->version_counter()),
      bytes_(static_cast<int64_t>(tensor.storage().nbytes())) {
  if (writes_.enabled()) version_ = writes_.current_version();
  const at::NoGradGuard no_grad;
  const MemoryScope category(depot_->category);
  const at::Tensor on_device = bytes_of(tensor);
  host_ = depot_->link.empty(bytes_, at::kByte);
  {
    const CopyStream::Scope copying(depot_->link.out);
    host_.copy_(on_device, /*non_blocking=*/true);
    keep_until_used(on_device);
    out_ = depot_->link.out.point();
  }
  depot_->away_bytes += bytes_;
  if (!on_disk) return;
  extent_ = depot_->file->take(bytes_);
  written_ = depot_->file->write(extent_, host_, [out = out_] { out.wait(); });
  depot_->await_write(written_, std::exchange(host_, {}));
}

ParkedStorage::~ParkedStorage() {
  if (!device_.defined()) depot_->away_bytes -= bytes_;
}

void ParkedStorage::leave_behind(int64_t bytes) {
  const MemoryScope category(depot_->category);
  left_ = at::empty({bytes}, at::TensorOptions(depot_->link.device).dtype(at::kByte));
}

bool ParkedStorage::holds(const at::Tensor& tensor) const {
  if (storage_.expired() || storage_._unsafe_get_target() != tensor.storage().unsafeGetStorageImpl()) return false;
  const c10::VariableVersion& writes = tensor.unsafeGetTensorImpl()->version_counter();
  if (!writes_.enabled() || !writes.enabled()) return false;
  return writes_.current_version() == version_ && writes.current_version() == version_;
}

void ParkedStorage::fetch() {
  if (device_.defined() || read_ != 0) return;
  const MemoryScope category(depot_->category);
  if (!extent_) return copy_in();
  host_ = depot_->link.empty(bytes_, at::kByte);
  read_ = depot_->file->read(extent_, host_);
}

at::Tensor ParkedStorage::copy_on_host(const at::Tensor& form) const {
  const at::NoGradGuard no_grad;
  const HostMemory beside;
  const MemoryScope category(depot_->category);
  at::Tensor bytes = host_;
  if (device_.defined()) {
    in_.wait();
    bytes = device_.cpu();
  } else if (read_ != 0) {
    depot_->file->wait(read_);
  } else if (extent_) {
    bytes = depot_->link.empty(bytes_, at::kByte);
    depot_->file->wait(depot_->file->read(extent_, bytes));
  } else {
    out_.wait();
  }
  at::Tensor tensor = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(bytes.storage()), bytes.key_set(), form.dtype());
  tensor.unsafeGetTensorImpl()->set_storage_offset(form.storage_offset());
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(form.sizes(), form.strides());
  return tensor;
}

void ParkedStorage::copy_in() {
  const at::NoGradGuard no_grad;
  const CopyStream::Scope copying(depot_->link.in, CopyStream::Behind::Nothing);
  out_.hold_device();
  left_.reset();
  device_ = at::empty({bytes_}, at::TensorOptions(depot_->link.device).dtype(at::kByte));
  device_.copy_(host_, /*non_blocking=*/true);
  in_ = depot_->link.in.point();
  host_.reset();
  depot_->away_bytes -= bytes_;
}

const at::Storage& ParkedStorage::restored() {
  require(!writes_.enabled() || writes_.current_version() == version_, "offload.activations: a tensor of ", bytes_,
          " bytes that backward needs was changed in place after it was saved; change a copy");
  return brought();
}

const at::Storage& ParkedStorage::brought() {
  fetch();
  if (!device_.defined()) {
    depot_->file->wait(read_);
    const MemoryScope category(depot_->category);
    copy_in();
    extent_.reset();
  }
  in_.hold_device();
  keep_until_used(device_);
  return device_.storage();
}

/// Its version says nothing: a master counts its writes with the weight that it was made from.
void ParkedStorage::refill(const at::Tensor& tensor) {
  brought();
  c10::StorageImpl* const back = device_.storage().unsafeGetStorageImpl();
  tensor.storage().unsafeGetStorageImpl()->set_data_ptr(back->set_data_ptr(at::DataPtr(nullptr, device_.device())));
}

bool ParkedStorage::map_into(const at::Tensor& tensor) const {
  if (!extent_ || device_.defined() || !depot_->link.device.is_cpu()) return false;
  depot_->file->wait(written_);
  auto memory = std::make_unique<std::shared_ptr<void>>(depot_->file->map(extent_));
  void* const begin = memory->get();
  tensor.storage().unsafeGetStorageImpl()->set_data_ptr(
      at::DataPtr(begin, memory.release(), [](void* kept) { delete static_cast<std::shared_ptr<void>*>(kept); }, tensor.device()));
  return true;
}

void free_memory(const at::Tensor& tensor) { tensor.storage().unsafeGetStorageImpl()->set_data_ptr(at::DataPtr(nullptr, tensor.device())); }

}  // namespace tessera::offload
