#pragma once

#include <algorithm>
#include <bit>

#include <sys/types.h>

#include "tessera/comm/backends/shm/core/event.h"

/// What lies where in the memory of a group. All of it is address space; only the control block and the small slots are reserved when the group forms.
namespace tessera::comm::shm {

enum class Presence : uint32_t { Absent, Joined, Left };

/// First in the segment: whether the group still works, and if not, why.
struct alignas(kLine) Soundness {
  enum : uint32_t { Sound, BeingWritten, Broken };
  std::atomic<uint32_t> state{Sound};
  int32_t rank = -1;  ///< who broke it
  char cause[kLine * 4 - 8] = {};
};

/// One rank's words. Written by that rank, but for the bell.
struct alignas(kLine) RankControl {
  Event arrived;  ///< rounds that this rank has entered
  Event bell;     ///< rung by whoever sent to this rank or took what it had sent
  alignas(kLine) std::atomic<Presence> presence{Presence::Absent};
  pid_t pid = 0;
  uint64_t start_time = 0;
  std::atomic<int32_t> arena{-1};  ///< descriptor of its arena in its process; -1 where it has none
};

/// Bytes that one rank has sent to another through their ring, and those that the other has taken.
struct RingControl {
  alignas(kLine) std::atomic<uint64_t> written{0};
  alignas(kLine) std::atomic<uint64_t> read{0};
};
static_assert(std::atomic<uint64_t>::is_always_lock_free);

/// Offsets for n ranks:
///   [soundness][n rank controls][n * n ring controls] [n * 2 small slots] | [n * 2 large slots] [n * n rings]
/// Each rank has two slots of each kind and uses them in turn, so that one wait per round is enough.
struct SegmentMap {
  static constexpr size_t kSmallSlot = 64 << 10;
  static constexpr size_t kLargeSlot = 768 << 10;  ///< with its twin in a cache of 2 MiB, beside what is read and written
  static constexpr size_t kRingBudget = 64 << 20;

  explicit SegmentMap(int ranks, size_t large_slot_bytes = kLargeSlot)
      : n(static_cast<size_t>(ranks)),
        large_slot(large_slot_bytes),
        ring(std::clamp(std::bit_floor(kRingBudget / (n * n)), size_t{16} << 10, size_t{256} << 10)),
        rank_controls(sizeof(Soundness)),
        ring_controls(rank_controls + n * sizeof(RankControl)),
        small_slots(page_aligned(ring_controls + n * n * sizeof(RingControl))),
        large_slots(small_slots + n * 2 * kSmallSlot),
        rings(large_slots + n * 2 * large_slot),
        total(rings + n * n * ring) {}

  static size_t page_aligned(size_t bytes) { return (bytes + 65535) / 65536 * 65536; }
  size_t small_at(int rank, uint32_t round) const { return small_slots + (static_cast<size_t>(rank) * 2 + round % 2) * kSmallSlot; }
  size_t large_at(int rank, uint32_t round) const { return large_slots + (static_cast<size_t>(rank) * 2 + round % 2) * large_slot; }
  size_t ring_at(int from, int to) const { return rings + (static_cast<size_t>(from) * n + static_cast<size_t>(to)) * ring; }
  size_t ring_control_at(int from, int to) const { return ring_controls + (static_cast<size_t>(from) * n + static_cast<size_t>(to)) * sizeof(RingControl); }

  size_t n, large_slot, ring;
  size_t rank_controls, ring_controls, small_slots, large_slots, rings, total;
};

}  // namespace tessera::comm::shm
