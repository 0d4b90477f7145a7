#include "tessera/checkpoint/staging.h"

#include <algorithm>
#include <utility>

#include <ATen/ops/empty.h>

#include "tessera/memory/memory.h"

// A full copy would let training go on at once and take a second model's memory; writing straight from the tensors would take none and have training wait for
// the disk. In between: copies in chunks, at most `limit` bytes of them, so that whoever puts waits for the disk only as far as it falls behind. A chunk counts
// until the taker comes back for the next, since only then is it done with its bytes; two fit at least, so that one is filled as another is written.

namespace tessera::checkpoint {
namespace {

// Small enough that writing begins early, large enough that a write costs more than its call.
constexpr int64_t kMostChunk = int64_t{8} << 20;

}  // namespace

Staging::Staging(int64_t limit) : limit_(limit), chunk_bytes_(std::clamp<int64_t>(limit / 2, 1, kMostChunk)) {}

bool Staging::put(const at::Tensor& tensor) {
  const auto bytes = tensor.detach().contiguous().view({-1}).view(at::kByte);
  for (int64_t begin = 0; begin < bytes.numel(); begin += chunk_bytes_) {
    if (!put_chunk(bytes.narrow(0, begin, std::min(chunk_bytes_, bytes.numel() - begin)))) return false;
  }
  return true;
}

bool Staging::put_chunk(const at::Tensor& bytes) {
  if (!reserve(bytes.numel())) return false;
  const MemoryScope category(MemoryCategory::Other);
  const Chunk chunk = bytes.is_cpu() ? copied_here(bytes) : copied_aside(bytes);
  const std::lock_guard lock(mutex_);
  queue_.push_back(chunk);
  changed_.notify_all();
  return !stopped_;
}

Staging::Chunk Staging::copied_here(const at::Tensor& bytes) {
  at::Tensor copy = at::empty({bytes.numel()}, at::TensorOptions(at::kCPU).dtype(at::kByte));
  copy.copy_(bytes);
  return {std::move(copy), {}};
}

/// The tensor may change, or its memory go to another, once the copy is done: that is a matter between the streams.
Staging::Chunk Staging::copied_aside(const at::Tensor& bytes) {
  if (!link_ || link_->device != bytes.device()) link_.emplace(bytes.device());
  const at::Tensor copy = link_->empty(bytes.numel(), at::kByte);
  const CopyStream::Point copied = [&] {
    const CopyStream::Scope copying(link_->out);
    copy.copy_(bytes, /*non_blocking=*/true);
    return link_->out.point();
  }();
  copied.hold_device();
  return {copy, copied};
}

bool Staging::reserve(int64_t size) {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return stopped_ || held_ + size <= limit_; });
  held_ += size;
  return !stopped_;
}

void Staging::finish() {
  const std::lock_guard lock(mutex_);
  finished_ = true;
  changed_.notify_all();
}

std::optional<Staging::Chunk> Staging::take() {
  std::unique_lock lock(mutex_);
  held_ -= std::exchange(taken_, 0);  // whoever asks for more has written the last
  changed_.notify_all();
  changed_.wait(lock, [&] { return finished_ || stopped_ || !queue_.empty(); });
  if (stopped_ || queue_.empty()) return std::nullopt;
  Chunk chunk = std::move(queue_.front());
  queue_.pop_front();
  taken_ = static_cast<int64_t>(chunk.bytes().size());
  lock.unlock();
  chunk.copied_.wait();
  return chunk;
}

void Staging::stop() {
  const std::lock_guard lock(mutex_);
  stopped_ = true;
  queue_.clear();
  changed_.notify_all();
}

}  // namespace tessera::checkpoint
