#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "tessera/comm/flight_record/format.h"

/// Flight records as values. Times are seconds since 1970 on the rank's own host.
namespace tessera::comm::flight {

struct RecordedGroup {
  std::string name;
  std::vector<int> members;  ///< ranks of the world, in group order
  uint64_t collectives = 0;  ///< that this rank has entered
};

struct RecordedCall {
  uint64_t number = 0;    ///< among all calls of the rank, from 0
  uint64_t sequence = 0;  ///< from 1: among the group's collectives, or among the messages of one direction to one peer under one tag
  uint32_t group = 0;     ///< index in RankRecord::groups
  State state = State::Entered;
  std::string op{};
  std::vector<int64_t> shape{};  ///< of the whole; of more than 8 sizes, the first 8
  bool more_dims = false;        ///< there were more than 8
  std::string dtype{};
  std::string reduction{};
  int64_t bytes = 0;
  int peer = -1;  ///< root, destination or source, in the group
  int tag = 0;
  std::string site{};
  double entered_s = 0;
  double left_s = 0;       ///< 0 unless completed or failed
  bool on_device = false;  ///< of an accelerator, where in flight means enqueued

  bool is_message() const { return op == "send" || op == "recv"; }
  bool ended() const { return state == State::Completed || state == State::Failed; }
  bool is_only_enqueued() const { return on_device && state == State::InFlight; }
};

struct RankRecord {
  int rank = 0;
  int world_size = 1;
  int pid = 0;
  int restart_count = 0;
  std::string host{};
  double started_s = 0;
  double seen_s = 0;    ///< last sign of life
  bool closed = false;  ///< in order: the program left the world
  std::string place{};  ///< what it is at between its calls; empty: nothing in particular
  std::vector<RecordedGroup> groups{};
  std::vector<RecordedCall> calls{};  ///< the last ones, oldest first
  uint64_t total_calls = 0;
};

/// Reads a record, of a process that lives or one that has ended; at most the last `most_calls` of its calls. Throws ConfigError with the file, the offset
/// in bytes and what is wrong there.
RankRecord read_record(const std::filesystem::path& file, uint64_t most_calls = UINT64_MAX);

/// The records of a folder, by rank. Where ranks of worlds of several sizes lie together, those of the world that started last.
struct Records {
  std::vector<RankRecord> ranks{};
  int world_size = 0;
  std::vector<int> missing{};  ///< ranks of which there is no record
};

/// What to do with a record that cannot be read.
enum class Damage { Refuse, LeaveOut };

/// Reads at most 2 million calls in all, the last ones of each rank (about 0.5 GB). Throws ConfigError where `dir` is no folder or holds no record, and for
/// a damaged one, as asked.
Records read_records(const std::filesystem::path& dir, Damage damage = Damage::Refuse);

}  // namespace tessera::comm::flight
