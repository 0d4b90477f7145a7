#include "tessera/plan/caching_allocator.h"

#include <algorithm>
#include <iterator>

#include <c10/core/AllocatorConfig.h>

// The allocator asks the device rarely, since that stops it: in segments of 2 MiB for tensors up to 1 MiB, of 20 MiB for those up to 10 MiB, and in steps of
// 2 MiB above. A tensor takes the smallest free block that holds it, and what is left over becomes a block of its own if it can be of use; a block that is
// given back joins its free neighbours. A device is short of what lies in segments, whatever of it tensors hold.

namespace tessera::plan {

namespace {

namespace theirs = c10::CachingAllocator;
constexpr int64_t kMinBlockSize = theirs::kMinBlockSize, kMinLargeAlloc = theirs::kMinLargeAlloc, kRoundLarge = theirs::kRoundLarge,
                  kSmallBuffer = theirs::kSmallBuffer, kSmallSize = theirs::kSmallSize;
constexpr int64_t kLargeBuffer = 20971520;  // the default of its setting large_segment_size_mb

int64_t round_up(int64_t bytes, int64_t step) { return (bytes + step - 1) / step * step; }

int64_t segment_for(int64_t bytes, bool small) {
  if (small) return kSmallBuffer;
  return bytes < kMinLargeAlloc ? kLargeBuffer : round_up(bytes, kRoundLarge);
}

}  // namespace

void CachingAllocator::allocate(int64_t id, int64_t bytes) {
  if (bytes <= 0) return;
  const int64_t rounded = round_up(bytes, kMinBlockSize);
  const bool small = rounded <= kSmallSize;
  const auto block = take(rounded, small);
  split(block, rounded);
  alive_ += block->second.bytes;
  block->second.id = id, block->second.asked = bytes, block->second.taken = ++allocations_;
  held_[id].push_back(block->first);
  by_bytes_.emplace(bytes, allocations_, block->first);
}

void CachingAllocator::release(int64_t id) {
  if (const auto held = held_.find(id); held != held_.end()) give_back(blocks_.find(held->second.front()));
}

void CachingAllocator::release(int64_t id, int64_t bytes) {
  if (held_.contains(id)) return release(id);
  const auto behind = by_bytes_.lower_bound({bytes + 1, 0, 0});
  if (behind == by_bytes_.begin()) return;
  if (const auto& [asked, taken, address] = *std::prev(behind); asked == bytes) give_back(blocks_.find(address));
}

void CachingAllocator::read(const Event& event) {
  const auto* change = std::get_if<MemoryChange>(&event.what);
  if (change == nullptr || change->on_host || event.writes.empty()) return;
  const int64_t id = event.writes.front();
  if (change->bytes > 0 && id == leaving_) {
    leaving_ = 0;
    return;
  }
  if (leaving_ != 0) release(leaving_, leaving_bytes_);
  leaving_ = change->bytes < 0 ? id : 0, leaving_bytes_ = -change->bytes;
  if (change->bytes > 0) allocate(id, change->bytes);
}

CachingAllocator::Blocks::iterator CachingAllocator::take(int64_t bytes, bool small) {
  Pool& pool = pool_of(small);
  const auto fits = pool.lower_bound({bytes, 0});
  if (fits == pool.end()) return new_segment(segment_for(bytes, small), small);
  const auto block = blocks_.find(fits->second);
  pool.erase(fits);
  block->second.free = false;
  return block;
}

CachingAllocator::Blocks::iterator CachingAllocator::new_segment(int64_t bytes, bool small) {
  if (limit_ > 0 && reserved_ + bytes > limit_) give_segments_back();
  reserved_ += bytes;
  peak_ = std::max(peak_, reserved_);
  const int64_t begin = end_;
  end_ += bytes;
  return blocks_.emplace_hint(blocks_.end(), begin, Block{.bytes = bytes, .begin = begin, .free = false, .small = small});
}

void CachingAllocator::split(Blocks::iterator block, int64_t bytes) {
  Block& whole = block->second;
  const int64_t left = whole.bytes - bytes;
  if (whole.small ? left < kMinBlockSize : left <= kSmallSize) return;
  const auto rest =
      blocks_.emplace_hint(std::next(block), block->first + bytes, Block{.bytes = left, .begin = whole.begin, .free = true, .small = whole.small});
  whole.bytes = bytes;
  pool_of(whole.small).emplace(left, rest->first);
}

void CachingAllocator::give_back(Blocks::iterator block) {
  const Block& left = block->second;
  alive_ -= left.bytes;
  by_bytes_.erase({left.asked, left.taken, block->first});
  const auto held = held_.find(left.id);
  std::erase(held->second, block->first);
  if (held->second.empty()) held_.erase(held);
  Pool& pool = pool_of(block->second.small);
  const auto join = [&](Blocks::iterator left, Blocks::iterator right) {
    left->second.bytes += right->second.bytes;
    blocks_.erase(right);
  };
  const auto is_free_neighbour = [&](Blocks::iterator other) { return other->second.free && other->second.begin == block->second.begin; };
  if (const auto next = std::next(block); next != blocks_.end() && is_free_neighbour(next)) {
    pool.erase({next->second.bytes, next->first});
    join(block, next);
  }
  if (block != blocks_.begin() && is_free_neighbour(std::prev(block))) {
    const auto before = std::prev(block);
    pool.erase({before->second.bytes, before->first});
    join(before, block);
    block = before;
  }
  block->second.free = true;
  pool.emplace(block->second.bytes, block->first);
}

void CachingAllocator::give_segments_back() {
  for (Pool& pool : free_) {
    for (auto at = pool.begin(); at != pool.end();) {
      const auto block = blocks_.find(at->second);
      const auto next = std::next(block);
      const bool whole = block->first == block->second.begin && (next == blocks_.end() || next->second.begin != block->second.begin);
      if (!whole) {
        ++at;
        continue;
      }
      reserved_ -= block->second.bytes;
      blocks_.erase(block);
      at = pool.erase(at);
    }
  }
}

}  // namespace tessera::plan
