#pragma once

#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

#include <ATen/ops/from_blob.h>

#include "tessera/core/error.h"
#include "tessera/memory/filed_tensor.h"

namespace tessera::testing_support {

/// In place of a file: memory that no tracker sees, and what was asked of it.
struct MemoryFile final : TensorFile {
  struct Tensor final : FiledTensor {
    Tensor(MemoryFile& file, const at::Tensor& memory) : file(file), memory(memory) {}
    const at::Tensor& tensor() const override { return memory; }
    void begin_copy(at::Tensor to) override {
      coming = std::move(to);
      ++file.begun;
      file.most_coming = std::max(file.most_coming, ++file.coming);
    }
    void await_copy() override {
      if (!coming.defined()) return;
      if (++file.awaited == file.fails_at) throw Error("a file that cannot be read");
      coming.copy_(memory);  // as late as may be: whoever reads it before finds something else
      coming.reset();
      --file.coming;
    }
    void let_go() override { ++file.let_go; }

    MemoryFile& file;
    at::Tensor memory, coming;
  };

  std::unique_ptr<FiledTensor> make(int64_t size, at::ScalarType dtype) override {
    elements += size;
    const auto bytes = std::make_shared<std::vector<double>>(static_cast<size_t>(size) * c10::elementSize(dtype) / sizeof(double) + 1);
    return std::make_unique<Tensor>(*this, at::from_blob(bytes->data(), {size}, [bytes](void*) {}, at::device(at::kCPU).dtype(dtype)));
  }

  int begun = 0, coming = 0, most_coming = 0, let_go = 0, awaited = 0;
  int fails_at = 0;  ///< which of the copies that are awaited does not come, once; 0: none
  int64_t elements = 0;
};

}  // namespace tessera::testing_support
