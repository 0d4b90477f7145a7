#include "tessera/nn/part_storage.h"

#include <memory>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <c10/core/StorageImpl.h>
#include <c10/core/TensorImpl.h>

#include "tessera/memory/memory.h"

// Views of a flat buffer all share its storage, so neither who holds one piece can be told nor one piece be taken out. A storage for each piece, over the
// buffer's memory and keeping the buffer alive, has its own use count, and its pointer can be exchanged under the aliases that somebody kept.

namespace tessera::nn {

at::Storage part_storage(const at::Tensor& part) {
  void* const memory = part.is_meta() || part.numel() == 0 ? nullptr : part.mutable_data_ptr();
  auto keeper = std::make_unique<at::Storage>(part.storage());
  at::DataPtr pointer(memory, keeper.release(), [](void* kept) { delete static_cast<at::Storage*>(kept); }, part.device());
  return at::Storage(c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), part.nbytes(), std::move(pointer), /*allocator=*/nullptr,
                                                           /*resizable=*/false));
}

void leave_to_aliases(const at::Storage& storage, const at::Tensor& part) {
  if (storage.use_count() <= 1 || part.is_meta() || part.numel() == 0) return;
  const at::NoGradGuard no_grad;
  const MemoryScope scope(MemoryCategory::Parameters);
  const at::Tensor own = at::empty(part.sizes(), part.options().requires_grad(false));
  own.copy_(part);
  storage.unsafeGetStorageImpl()->set_data_ptr(own.storage().unsafeGetStorageImpl()->set_data_ptr(at::DataPtr(nullptr, part.device())));
}

at::Tensor shown_through(const at::Storage& storage, const at::Tensor& part) {
  at::Tensor shown = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(storage), part.key_set(), part.dtype());
  shown.unsafeGetTensorImpl()->set_sizes_and_strides(part.sizes(), part.strides(), 0);
  return shown;
}

}  // namespace tessera::nn
