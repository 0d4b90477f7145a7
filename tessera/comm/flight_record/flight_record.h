#pragma once

#include <condition_variable>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string_view>
#include <thread>
#include <vector>

#include "tessera/comm/call.h"
#include "tessera/comm/flight_record/format.h"
#include "tessera/comm/world.h"

namespace tessera::comm {

/// One rank's last `capacity` collectives and messages in a file that outlives the process, however it ends (format.h, docs/formats.md).
///
/// Writing is stores into a shared mapping of the file, whose 256 bytes a call (5 MiB) are reserved when it is made, so that no later store can meet a full
/// disk. `enter` and `mark` may be called by several threads at once: one atomic addition deals the slots, and nothing locks. Together they take about 0.1 us,
/// half of it two readings of the clock. A thread of the record's own renews the sign of life, which tells a rank that waits from one that ended or was
/// stopped, and looks after calls on devices.
class FlightRecord {
 public:
  static constexpr uint64_t kCapacity = 20'000;
  static constexpr std::chrono::milliseconds kSignOfLife{200};

  /// The file of a rank.
  static std::filesystem::path file_of(const std::filesystem::path& dir, int rank);

  /// Removes the files of `ranks`, and of all ranks that a world of `world_size` does not have. For whoever is about to start them: until a rank makes its
  /// record, one that lies there is of an earlier run.
  static void remove_files(const std::filesystem::path& dir, const std::vector<int>& ranks, int world_size) noexcept;

  /// Makes the folder and the rank's file anew; rank 0 also removes those that a larger world left. Throws std::system_error where that cannot be done.
  FlightRecord(const std::filesystem::path& dir, const Environment& environment, uint64_t capacity = kCapacity);
  /// Closes the record: what follows is no sign of a crash.
  ~FlightRecord();
  FlightRecord(const FlightRecord&) = delete;
  FlightRecord& operator=(const FlightRecord&) = delete;

  /// A group in the file's table.
  struct GroupSlot {
    uint32_t number = 0;
    uint64_t* collectives = nullptr;  ///< that this rank has entered in it
    int size = 1;
  };
  /// Nothing where the table is full (64 KiB and 128 bytes per rank of the world).
  std::optional<GroupSlot> add_group(const GroupInfo& group);

  /// Writes a call down, with the CallSite of this thread, and returns its number among all of the rank's calls, from 0. `message`: the number of a send or
  /// recv among those of one direction to one peer under one tag, from 1.
  uint64_t enter(const GroupSlot& group, const Call& call, uint64_t message = 0);
  /// Sets the state of call `number`, with the time where it is an end. Does nothing where its slot has been taken by a later call.
  void mark(uint64_t number, flight::State state);

  /// Has the record's thread ask how far a call has come for which no host waits, as often as it shows that the rank lives, until the answer is an end or the
  /// call is forgotten. `ask` may throw, which says nothing.
  void follow(uint64_t number, std::function<flight::State()> ask);
  /// Waits where the thread is about to ask.
  void forget(uint64_t number);

  /// What the rank is at from now on, between its calls.
  void set_place(std::string_view place);

  const std::filesystem::path& path() const { return path_; }

 private:
  void show_signs_of_life();
  void ask_followed();

  std::filesystem::path path_;
  void* mapping_ = nullptr;
  size_t bytes_ = 0;
  flight::Header* header_ = nullptr;
  flight::Entry* entries_ = nullptr;

  std::mutex mutex_;  // of the table of groups, and of the end
  uint32_t groups_ = 0;
  bool closing_ = false;
  std::condition_variable closed_;
  std::mutex followed_mutex_;
  std::map<uint64_t, std::function<flight::State()>> followed_;
  std::thread watch_;
};

}  // namespace tessera::comm
