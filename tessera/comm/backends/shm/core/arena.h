#pragma once

#include <map>
#include <mutex>
#include <optional>

#include "tessera/comm/backends/shm/core/session.h"

namespace tessera::comm::shm {

/// Memory of one rank that its peers can map, for buffers that need no staging: one file of as much address space as the machine has memory, or its share of
/// what a group may take of a process's addresses where that is less, of which only what is allocated takes memory. What is given back goes to the system at
/// once, also from under the peers' mappings; nobody reads it any more, for a collective ends only when all are done with its buffers. Thread-safe. Outlives
/// the group for as long as blocks of it live.
class Arena {
 public:
  /// Publishes it in the rank's control block. Throws Failure where the system has no address space for it.
  explicit Arena(const Session& session);

  /// Whole pages; null where so many addresses in a row are not left. Throws Failure, with the sizes, where memory is missing.
  std::byte* allocate(size_t bytes);
  void free(std::byte* block) noexcept;

  std::byte* data() const { return segment_.data(); }
  /// Where from the arena's start `data` lies; nothing where it lies elsewhere.
  std::optional<uint64_t> offset_of(const void* data) const;

  /// Of each rank's in a group of so many: all of them are mapped by each.
  static size_t address_space(int ranks);

 private:
  Segment segment_;
  std::mutex mutex_;
  std::map<size_t, size_t> unused_;  ///< offset -> bytes, never adjacent
  std::map<size_t, size_t> used_;
};

/// The peers' arenas, each mapped when it is first looked at: addresses are scarce, and most groups have no buffers there. One thread at a time.
class ArenaViews {
 public:
  explicit ArenaViews(const Session& session) : session_(session), views_(static_cast<size_t>(session.size())) {}
  /// Where the arena of `rank` begins in this process. Throws Failure where it cannot be mapped: addresses or descriptors are missing.
  std::byte* of(int rank);
  /// Unmaps them all.
  void clear();

 private:
  const Session& session_;
  std::vector<std::optional<Segment>> views_;
};

}  // namespace tessera::comm::shm
