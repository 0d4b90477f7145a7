#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <mutex>
#include <optional>
#include <span>
#include <utility>

#include <ATen/core/Tensor.h>

#include "tessera/memory/host_link.h"

namespace tessera::checkpoint {

/// Bytes on their way from a thread that must go on to one that writes to disk: a queue of copies that never holds more than `limit` bytes. One thread puts,
/// one takes. They count as MemoryCategory::Other on the tracker of the thread that puts, until whoever took them drops them. From an accelerator they are
/// copied into pinned memory on a stream of their own: the thread that puts waits for none, and who takes a chunk waits for its copy.
class Staging {
 public:
  /// `limit` is at least 1.
  explicit Staging(int64_t limit);

  class Chunk {
   public:
    Chunk(at::Tensor bytes, CopyStream::Point copied) : bytes_(std::move(bytes)), copied_(std::move(copied)) {}
    std::span<std::byte> bytes() { return {static_cast<std::byte*>(bytes_.mutable_data_ptr()), bytes_.nbytes()}; }

   private:
    friend class Staging;
    at::Tensor bytes_;
    CopyStream::Point copied_;
  };

  /// Copies a tensor's elements in row-major order, from any device, in chunks. Blocks while the queue is full. False once stop() was called: then
  /// nobody wants the rest. What the current stream is asked for afterwards may change the tensor.
  bool put(const at::Tensor& tensor);
  /// After the last put.
  void finish();

  /// The next bytes; nothing after the last. Blocks while the queue is empty.
  std::optional<Chunk> take();
  /// The taker gives up: what is queued is freed, and put() no longer blocks.
  void stop();

 private:
  bool put_chunk(const at::Tensor& bytes);
  static Chunk copied_here(const at::Tensor& bytes);
  Chunk copied_aside(const at::Tensor& bytes);
  /// Waits until `size` bytes fit; false once stopped.
  bool reserve(int64_t size);

  const int64_t limit_, chunk_bytes_;
  std::optional<HostLink> link_;  ///< of the accelerator from which tensors came; used by the thread that puts
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Chunk> queue_;
  int64_t held_ = 0;   ///< bytes that are queued, or being filled or written
  int64_t taken_ = 0;  ///< of the chunk that the taker has
  bool finished_ = false, stopped_ = false;
};

}  // namespace tessera::checkpoint
