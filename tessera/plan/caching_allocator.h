#pragma once

#include <cstdint>
#include <map>
#include <set>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

#include "tessera/core/events.h"

namespace tessera::plan {

/// What libtorch's caching allocator takes of an accelerator for a sequence of allocations: segments, which it asks the device for, cuts into blocks, and
/// keeps. What it has reserved is what the device is short of, and lies above the bytes of tensors by rounding and by holes that no later tensor fits.
///
/// Follows libtorch's default settings (no expandable segments, no largest split), of one stream. Without a `limit` nothing is ever given back; with one, what
/// is wholly free is, before a segment would pass it, and a segment that passes it all the same is counted: peak() is then above the limit, and a device would
/// be out of memory. Cost: a logarithm of the free blocks an allocation; memory for what is alive.
class CachingAllocator {
 public:
  explicit CachingAllocator(int64_t limit = 0) : limit_(limit) {}

  /// `id` names the allocation until it is given back. Several that are alive under one name are given back the first first.
  void allocate(int64_t id, int64_t bytes);
  void release(int64_t id);

  /// Of memory on the device, as a rank's events tell it. What changes its category keeps its place. Where one micro-batch's events stand for another's
  /// (rehearsal.h), one gives back what the one before has taken, by the name that its stand-in has for that: then the newest of as many bytes goes.
  void read(const Event& event);

  int64_t reserved() const { return reserved_; }  ///< bytes of segments
  int64_t peak() const { return peak_; }          ///< the most there were
  int64_t alive() const { return alive_; }        ///< bytes of blocks in use, rounded as they are cut

 private:
  struct Block {
    int64_t bytes = 0;
    int64_t begin = 0;  ///< of its segment
    bool free = false;
    bool small = false;                    ///< of the pool of small blocks
    int64_t id = 0, asked = 0, taken = 0;  ///< of what is in it: its name, the bytes that were asked for, and when, counted in allocations
  };
  using Blocks = std::map<int64_t, Block>;             ///< by address
  using Pool = std::set<std::pair<int64_t, int64_t>>;  ///< bytes and address: the smallest that fits comes first

  Pool& pool_of(bool small) { return free_[small ? 1 : 0]; }
  Blocks::iterator take(int64_t bytes, bool small);
  Blocks::iterator new_segment(int64_t bytes, bool small);
  void split(Blocks::iterator block, int64_t bytes);
  void release(int64_t id, int64_t bytes);
  void give_back(Blocks::iterator block);
  void give_segments_back();

  int64_t limit_;
  int64_t reserved_ = 0, peak_ = 0, alive_ = 0, end_ = 0;
  Blocks blocks_;
  Pool free_[2];
  std::unordered_map<int64_t, std::vector<int64_t>> held_;    ///< addresses, by name
  std::set<std::tuple<int64_t, int64_t, int64_t>> by_bytes_;  ///< of all that is alive: bytes asked for, when it was taken, address
  int64_t allocations_ = 0;
  int64_t leaving_ = 0, leaving_bytes_ = 0;  ///< what an event gave back, until the next says whether it only changed its category
};

}  // namespace tessera::plan
