#include "tests/support/sim_device/aliases.h"

#include <cstring>

#include <c10/core/StorageImpl.h>
#include <c10/core/TensorImpl.h>

#include "tests/support/sim_device/device.h"
#include "tests/support/sim_device/memory.h"

namespace tessera::sim {

namespace {

/// The bytes of a CPU storage in new memory of the device.
c10::DataPtr copied(const c10::Storage& host, c10::Device device) {
  if (host.nbytes() == 0 || !host.data()) return {nullptr, device};
  void* const data = take(host.nbytes(), device.index(), stream_number(current_stream(device.index())));
  std::memcpy(host_of(data), host.data(), host.nbytes());
  return {data, data, device_allocator()->raw_deleter(), device};
}

void copy_shape(const at::Tensor& from, const at::Tensor& to) {
  to.unsafeGetTensorImpl()->set_sizes_and_strides(from.sizes(), from.strides(), from.storage_offset());
}

at::Tensor tensor_on(c10::Storage storage, c10::DispatchKey key, const at::Tensor& like) {
  auto tensor = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(key), like.dtype());
  copy_shape(like, tensor);
  if (like.unsafeGetTensorImpl()->is_wrapped_number()) tensor.unsafeGetTensorImpl()->set_wrapped_number(true);
  if (like.is_conj()) tensor._set_conj(true);
  if (like.is_neg()) tensor._set_neg(true);
  return tensor;
}

}  // namespace

at::Tensor Aliases::operator()(const at::Tensor& tensor) {
  if (!tensor.defined() || tensor.device().type() != sim_type()) return tensor;
  for (const auto& [device, host] : tensors_) {
    if (device.is_same(tensor)) return host;
  }
  return tensors_.emplace_back(tensor, tensor_on(storage_of(tensor), c10::DispatchKey::CPU, tensor)).second;
}

c10::Storage Aliases::storage_of(const at::Tensor& tensor) {
  const auto& device = tensor.storage();
  for (const auto& shared : storages_) {
    if (shared.device.is_alias_of(device)) return shared.host;
  }
  void* const address = host_of(device.mutable_data());  // throws for memory that was given back
  c10::Storage host(c10::Storage::use_byte_size_t(), device.nbytes(), c10::DataPtr(address, c10::Device(c10::kCPU)), c10::GetAllocator(c10::kCPU), true);
  return storages_.emplace_back(Shared{.device = device, .host = host, .address = address}).host;
}

void Aliases::carry_back(c10::Device device) {
  for (const auto& shared : storages_) {
    if (!shared.address && !shared.host.data()) continue;
    const bool moved = shared.host.data() != shared.address;
    if (!moved && shared.host.nbytes() == shared.device.nbytes()) continue;
    auto* const impl = shared.device.unsafeGetStorageImpl();
    if (moved) impl->set_data_ptr_noswap(copied(shared.host, device));
    impl->set_nbytes(shared.host.nbytes());
  }
  for (const auto& [on_device, host] : tensors_) {
    if (on_device.sizes() != host.sizes() || on_device.strides() != host.strides() || on_device.storage_offset() != host.storage_offset()) {
      copy_shape(host, on_device);
    }
  }
}

at::Tensor Aliases::wrap(const at::Tensor& result, c10::Device device, bool& fresh) {
  fresh = false;
  if (!result.defined() || !result.device().is_cpu() || !result.has_storage()) return result;
  for (const auto& [on_device, host] : tensors_) {
    if (host.is_same(result)) return on_device;
  }
  for (const auto& shared : storages_) {
    if (shared.host.is_alias_of(result.storage())) return tensor_on(shared.device, sim_key(), result);
  }
  fresh = true;
  c10::Storage storage(c10::Storage::use_byte_size_t(), result.storage().nbytes(), copied(result.storage(), device), device_allocator(), true);
  storages_.push_back({.device = storage, .host = result.storage(), .address = nullptr});
  return tensor_on(std::move(storage), sim_key(), result);
}

}  // namespace tessera::sim
