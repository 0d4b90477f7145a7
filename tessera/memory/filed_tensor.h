#pragma once

#include <cstdint>
#include <memory>

#include <ATen/core/Tensor.h>

namespace tessera {

/// Memory of the host that is a part of a file: whoever computes on the host sees a tensor like any other, whose pages the system brings and drops as it has
/// room; whoever wants to go on meanwhile asks for a copy, and waits for it later. No tracker counts it. Used by one thread.
class FiledTensor {
 public:
  virtual ~FiledTensor() = default;

  /// [size], undefined in content at first. On meta it has no memory. Lives on for as long as anybody holds it, or a view of it.
  virtual const at::Tensor& tensor() const = 0;
  /// Begins to copy what is there to `to`, of as many bytes on the host, beside whoever computes; nobody writes the tensor until await_copy() or the next call.
  virtual void begin_copy(at::Tensor to) = 0;
  /// Waits for it. Throws Error where the file cannot be read.
  virtual void await_copy() = 0;
  /// Nobody needs its pages in memory for now: what was written is kept.
  virtual void let_go() = 0;
};

/// A file that such tensors lie in. Each rank has its own.
class TensorFile {
 public:
  virtual ~TensorFile() = default;
  /// Takes the room on disk. Throws Error where the disk, or what the process may map, is too small.
  virtual std::unique_ptr<FiledTensor> make(int64_t size, at::ScalarType dtype) = 0;
};

}  // namespace tessera
