#pragma once

#include <compare>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "tessera/comm/flight_record/reader.h"

/// The records of all ranks laid side by side.
namespace tessera::comm::flight {

/// Calls that meet: those of one group, or the messages from one rank to another under one tag, each rank counting its own.
struct Stream {
  int group = 0;                      ///< index in Merge::groups
  int source = -1, destination = -1;  ///< of messages, ranks of the world
  int tag = 0;
  auto operator<=>(const Stream&) const = default;
};

struct Meeting {
  Stream stream;
  uint64_t sequence = 0;
  auto operator<=>(const Meeting&) const = default;
};

/// A call that its rank has entered and not completed, the first of its stream that holds the rank up.
struct Wait {
  const RankRecord* record = nullptr;
  const RecordedCall* call = nullptr;
  Meeting meeting;
  std::vector<int> absent;   ///< ranks that have to come and, as their records say, have not
  std::vector<int> unknown;  ///< ranks that have to come and of which there is no record
  bool blocks = false;       ///< the rank's thread is inside, or failed there; otherwise the call is only in flight
  bool failed = false;
  double until_s = 0;  ///< when it failed, or the rank's last sign of life

  int rank() const { return record->rank; }
  double waited_s() const { return until_s - call->entered_s; }
  /// Whom it waits for: who is known not to have come, or else who may not have.
  const std::vector<int>& awaited() const { return absent.empty() ? unknown : absent; }
};

/// Ranks that entered different things where they meet: each side's ranks with one of their calls.
struct Side {
  std::vector<int> ranks;
  const RecordedCall* call = nullptr;
};
struct Mismatch {
  Meeting meeting;
  std::vector<Side> sides;  ///< fewest ranks first
};

/// Views into `records`, which must outlive it.
class Merge {
 public:
  explicit Merge(const Records& records);

  const Records& records() const { return records_; }
  /// Groups of the same name and members that were made several times are several, matched by the order in which each rank made them.
  const std::vector<RecordedGroup>& groups() const { return groups_; }
  const RecordedGroup& group_of(const Meeting& meeting) const { return groups_[meeting.stream.group]; }
  const RankRecord* record_of(int rank) const;

  /// At most one per rank and stream, by rank.
  const std::vector<Wait>& waits() const { return waits_; }
  /// Ranks that have asked their devices for it, which have not come to it.
  std::vector<int> only_enqueued(const Meeting& meeting) const;
  /// The mismatch that was entered first, among the calls that the records still hold; none has no sides.
  Mismatch first_mismatch() const;

 private:
  void merge_groups();
  void count_calls();
  void find_waits(const RankRecord& record);
  Wait judge(const RankRecord& record, const std::vector<const RecordedCall*>& open) const;
  Meeting meeting_of(const RankRecord& record, const RecordedCall& call) const;
  std::vector<int> participants(const Stream& stream) const;
  bool has_entered(int rank, const Meeting& meeting) const;

  const Records& records_;
  std::map<int, const RankRecord*> by_rank_;
  std::vector<RecordedGroup> groups_;
  std::map<int, std::vector<int>> numbers_;             ///< by rank: its groups' indices in groups_
  std::map<std::pair<int, Stream>, uint64_t> entered_;  ///< calls that a rank has entered in a stream
  std::vector<Wait> waits_;
};

}  // namespace tessera::comm::flight
