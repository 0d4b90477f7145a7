#include "tessera/offload/mapped_file.h"

#include <utility>

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/StorageImpl.h>
#include <sys/mman.h>

#include "tessera/offload/spill_file.h"

// Two ways lead to the same bytes, and the system keeps them one: the mapping, by which optimizers, norms, clipping and checkpoints need to know nothing of a
// file, and reads into pinned memory by a thread, which a device's copies want and which touch no page of the mapping. No page that was written is lost when
// it is dropped from the mapping: it is the file's.

namespace tessera {

namespace {

/// Of so many elements, without memory: a dry run sees its shape.
at::Tensor without_memory(int64_t size, at::ScalarType dtype) {
  const at::Tensor flat = at::empty({0}, at::device(at::kMeta).dtype(dtype));
  const size_t bytes = static_cast<size_t>(size) * c10::elementSize(dtype);
  auto* const impl = flat.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(
      at::Storage(c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), bytes, at::DataPtr(nullptr, flat.device()),
                                                        /*allocator=*/nullptr, /*resizable=*/false)));
  impl->set_sizes_and_strides(at::IntArrayRef{size}, at::IntArrayRef{1});
  return flat;
}

class MappedTensor final : public FiledTensor {
 public:
  MappedTensor(std::shared_ptr<offload::SpillFile> file, int64_t size, at::ScalarType dtype, bool dry) : file_(std::move(file)) {
    if (size > 0) extent_ = file_->take(size * static_cast<int64_t>(c10::elementSize(dtype)));
    if (dry || size == 0) {
      tensor_ = dry ? without_memory(size, dtype) : at::empty({0}, at::device(at::kCPU).dtype(dtype));
      return;
    }
    const std::shared_ptr<void> memory = file_->map(extent_);
    tensor_ = at::from_blob(memory.get(), {size}, [memory](void*) {}, at::device(at::kCPU).dtype(dtype));
  }

  const at::Tensor& tensor() const override { return tensor_; }
  void begin_copy(at::Tensor to) override {
    if (extent_) copy_ = file_->read(extent_, std::move(to));
  }
  void await_copy() override { file_->wait(copy_); }
  void let_go() override {
    // Of pages that several tensors share, none is lost either.
    if (!tensor_.is_meta() && tensor_.numel() > 0) ::madvise(tensor_.mutable_data_ptr(), tensor_.nbytes(), MADV_DONTNEED);
  }

 private:
  std::shared_ptr<offload::SpillFile> file_;
  std::shared_ptr<offload::SpillFile::Extent> extent_;
  at::Tensor tensor_;
  offload::SpillFile::Ticket copy_ = 0;
};

class MappedFile final : public TensorFile {
 public:
  MappedFile(const std::filesystem::path& dir, const DiskBytes& disk, bool dry)
      : dry_(dry), file_(std::make_shared<offload::SpillFile>(dir, "offload.dir", disk, dry)) {}

  std::unique_ptr<FiledTensor> make(int64_t size, at::ScalarType dtype) override { return std::make_unique<MappedTensor>(file_, size, dtype, dry_); }

 private:
  bool dry_;
  std::shared_ptr<offload::SpillFile> file_;
};

}  // namespace

std::shared_ptr<TensorFile> make_mapped_file(const std::filesystem::path& dir, const DiskBytes& disk, bool dry) {
  return std::make_shared<MappedFile>(dir, disk, dry);
}

}  // namespace tessera
