#include "tessera/comm/backends/shm/core/arena.h"

#include <algorithm>

#include <sys/mman.h>
#include <unistd.h>

// The file has its size from the start, so it never grows and never moves: a peer maps it once, and an offset stays right for ever. Blocks are few
// and large and live long: the first hole that fits will do, and what comes back joins its neighbors. Its pages go to the system at once.

namespace tessera::comm::shm {
namespace {

// Of the 128 TiB of addresses that a process has, those that the arenas of a group may take: a process is in several groups.
constexpr size_t kMostAddresses = size_t{16} << 40;

size_t whole_pages(size_t bytes) { return (bytes + page_size() - 1) / page_size() * page_size(); }

}  // namespace

size_t Arena::address_space(int ranks) {
  return std::min(static_cast<size_t>(::sysconf(_SC_PHYS_PAGES)), kMostAddresses / static_cast<size_t>(ranks) / page_size()) * page_size();
}

Arena::Arena(const Session& session) : segment_(Segment::create(address_space(session.size()), session.membership().folder)) {
  unused_.emplace(0, segment_.bytes());
  session.control(session.rank()).arena.store(segment_.descriptor(), std::memory_order_release);
}

std::byte* Arena::allocate(size_t bytes) {
  const auto size = whole_pages(bytes);
  const std::lock_guard lock(mutex_);
  for (auto hole = unused_.begin(); hole != unused_.end(); ++hole) {
    const auto [offset, room] = *hole;
    if (room < size) continue;
    segment_.reserve(offset, size);
    unused_.erase(hole);
    if (room > size) unused_.emplace(offset + size, room - size);
    used_.emplace(offset, size);
#if defined(MADV_POPULATE_WRITE)
    ::madvise(data() + offset, size, MADV_POPULATE_WRITE);  // now, rather than page by page in the first step
#endif
    return data() + offset;
  }
  return nullptr;
}

void Arena::free(std::byte* block) noexcept {
  const std::lock_guard lock(mutex_);
  const auto found = used_.find(static_cast<size_t>(block - data()));
  auto [offset, size] = *found;
  used_.erase(found);
  segment_.release(offset, size);
  // Neighbouring holes become one, or large buffers would find no room between what small ones left.
  auto after = unused_.lower_bound(offset);
  if (after != unused_.end() && after->first == offset + size) {
    size += after->second;
    after = unused_.erase(after);
  }
  if (after != unused_.begin()) {
    const auto before = std::prev(after);
    if (before->first + before->second == offset) {
      before->second += size;
      return;
    }
  }
  unused_.emplace(offset, size);
}

std::optional<uint64_t> Arena::offset_of(const void* data) const {
  const auto* const at = static_cast<const std::byte*>(data);
  if (at < segment_.data() || at >= segment_.data() + segment_.bytes()) return std::nullopt;
  return static_cast<uint64_t>(at - segment_.data());
}

std::byte* ArenaViews::of(int rank) {
  auto& view = views_[static_cast<size_t>(rank)];
  if (!view) {
    const auto& control = session_.control(rank);
    const auto path = "/proc/" + std::to_string(control.pid) + "/fd/" + std::to_string(control.arena.load(std::memory_order_acquire));
    view.emplace(Segment::open(path, Arena::address_space(session_.size()), session_.membership().folder));
  }
  return view->data();
}

void ArenaViews::clear() {
  for (auto& view : views_) view.reset();
}

}  // namespace tessera::comm::shm
