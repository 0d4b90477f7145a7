#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "tessera/comm/backends/shm/core/failure.h"
#include "tessera/comm/backends/shm/core/layout.h"
#include "tessera/comm/backends/shm/core/process.h"
#include "tessera/comm/backends/shm/core/segment.h"

namespace tessera::comm::shm {

/// Where ranks meet before they share memory: keys and values that every member can set and read.
class Directory {
 public:
  virtual ~Directory() = default;
  virtual void set(const std::string& key, const std::string& value) = 0;
  /// Waits for the key; throws where it does not come.
  virtual std::string get(const std::string& key) = 0;
};

/// This rank's place in a group, and what the group may use.
struct Membership {
  std::string group = "world";
  int rank = 0;
  int size = 1;
  std::chrono::milliseconds timeout = std::chrono::minutes(5);  ///< longest wait for a peer
  std::string host{};                                           ///< identity of this host, equal where memory can be shared
  std::string host_name{};                                      ///< what messages call it
  std::string folder{};                                         ///< where to keep files; empty: a memfd
  bool alone_on_core = true;                                    ///< false where the ranks of this host have more threads than it has cores
  bool as_processes = false;                                    ///< keep ranks of one process out of each other's memory (for tests)
  bool files_are_hidden = false;                                ///< behave as where peers may not open each other's files through /proc (for tests)
  size_t large_slot_bytes = SegmentMap::kLargeSlot;             ///< a staged chunk, with the reduced shares; the same on all ranks
};

/// The memory that a group shares, as one rank sees it: joining and leaving, waiting for peers, and knowing when waiting is in vain.
/// Thread-safe but for its construction and end.
class Session {
 public:
  /// Joins; returns once all have. Throws Failure, the same at every rank, where hosts differ or memory is missing.
  Session(Membership membership, Directory& directory);
  /// Leaves.
  ~Session();
  Session(const Session&) = delete;
  Session& operator=(const Session&) = delete;

  int rank() const { return membership_.rank; }
  int size() const { return membership_.size; }
  const Membership& membership() const { return membership_; }
  const SegmentMap& layout() const { return layout_; }
  RankControl& control(int rank) const { return controls_[rank]; }
  std::byte* at(size_t offset) const { return segment_->data() + offset; }
  /// Segment::reserve; where it fails, the group breaks.
  void reserve(size_t offset, size_t bytes) const;

  /// Whether all ranks live in this process and may read each other's memory by address.
  bool one_process() const { return one_process_; }
  /// Whether peers can open files of this process, and so its arena.
  bool peers_read_files() const { return peers_read_files_; }
  /// "rank 2 of group dp (pid 123)"
  std::string name_of(int rank) const;

  void set_timeout(std::chrono::milliseconds timeout) { timeout_.store(timeout.count(), std::memory_order_relaxed); }
  /// Ends every wait in the group with an error.
  void abort() noexcept;
  /// Says goodbye: who still waits for this rank gets an error. Idempotent.
  void leave() noexcept;
  /// Tells all ranks that the group is broken, and throws.
  [[noreturn]] void fail(const std::string& cause) const;
  /// Throws where the group is broken.
  void check_sound() const {
    if (soundness().state.load(std::memory_order_acquire) != Soundness::Sound) [[unlikely]]
      throw_cause();
  }

  /// Returns when `ready()`: spins, then sleeps on `event`, which has to change whenever `ready` may. `late()` lists the ranks that are waited for. Throws
  /// Failure where the group breaks, a peer dies, one of the late has left, or nothing came in time.
  template <class Ready, class Late>
  void await(Event& event, const Ready& ready, const Late& late) const {
    if (ready() || spin(ready)) return;
    for (Patience patience(*this);;) {
      const auto seen = event.value.load(std::memory_order_acquire);
      if (ready()) return;
      check_sound();
      const auto missing = find_left(late);
      if (ready()) return;  // it arrived, and then it left
      if (missing) fail(name_of(*missing) + " has left");
      if (!event.sleep(seen, kGlance) && !ready()) patience.glance([&] { return late(); });
    }
  }

 private:
  static constexpr std::chrono::milliseconds kGlance{50};  ///< how often a sleeper looks whether its peers still live

  /// What a wait does each time that it was not woken.
  class Patience {
   public:
    explicit Patience(const Session& session) : session_(session), start_(std::chrono::steady_clock::now()) {}
    void glance(const std::function<std::vector<int>()>& late) const;

   private:
    const Session& session_;
    std::chrono::steady_clock::time_point start_;
  };

  template <class Ready>
  bool spin(const Ready& ready) const {
    const auto longest = spin_time(spin_);
    if (longest.count() == 0) return false;
    const auto end = std::chrono::steady_clock::now() + longest;
    do {
      for (int i = 0; i < 32; ++i) {
        pause();
        if (ready()) return true;
      }
      std::this_thread::yield();  // the peer may have been put on this very core
    } while (std::chrono::steady_clock::now() < end && soundness().state.load(std::memory_order_relaxed) == Soundness::Sound);
    return false;
  }

  template <class Late>
  std::optional<int> find_left(const Late& late) const {
    for (const int rank : late()) {
      if (control(rank).presence.load(std::memory_order_acquire) == Presence::Left) return rank;
    }
    return std::nullopt;
  }

  Soundness& soundness() const { return *reinterpret_cast<Soundness*>(segment_->data()); }
  bool break_group(const std::string& cause) const noexcept;
  void wake_all() const noexcept;
  [[noreturn]] void throw_cause() const;
  void check_alive() const;

  std::shared_ptr<Segment> meet(Directory& directory);
  std::shared_ptr<Segment> found(Directory& directory);
  std::shared_ptr<Segment> follow(Directory& directory);
  void enter(Directory& directory);

  Membership membership_;
  SegmentMap layout_;
  bool peers_read_files_ = true;  // before the segment, whose making may clear it
  std::shared_ptr<Segment> segment_;
  RankControl* controls_ = nullptr;
  std::vector<std::pair<int, ProcessWatch>> watches_;  ///< of the peers in other processes
  bool one_process_ = false;
  std::chrono::nanoseconds spin_{};
  std::atomic<int64_t> timeout_;  ///< ms
};

}  // namespace tessera::comm::shm
