#pragma once

#include <string>
#include <vector>

#include "tessera/comm/flight_record/merge.h"

/// Who kept whom waiting: pure functions of the records.
///
/// A rank that waits points at those that have not come to the call it waits in. Who is pointed at and points at nobody is where it began; a
/// circle of ranks that point at each other is a deadlock. Ranks that entered different things in the same place come before all that: what happened later
/// is their consequence.
///
/// Times of ranks on several hosts are compared by their hosts' clocks, to the second: what needs it (a rank that gave no sign of life) allows for 3 s.
namespace tessera::comm::flight {

struct Verdict {
  enum class Kind {
    Mismatch,      ///< ranks entered different things where they should have met
    NeverEntered,  ///< some ranks wait for others that never came
    Deadlock,      ///< some ranks wait for each other in a circle
    Stalled,       ///< all came, alike, and it does not end, or failed
    Outside,       ///< nobody waits; some ranks have not left the world
    Nothing,       ///< nobody waits, and all have left the world
  };
  Kind kind = Kind::Nothing;
  std::string sentence{};       ///< one line, no full stop
  std::vector<int> culprits{};  ///< ranks that the sentence blames; for Outside, the one that is outside for longest
  std::vector<int> waiting{};   ///< ranks that wait, for whomever
  bool names_cause = false;  ///< it says who kept whom waiting, or who disagreed; where a call failed at once, or all had come to it, its own error says more
};

/// Such as: rank 5 never entered all_gather #1234 of tp (layers.17.mlp); ranks 4, 6, 7 wait 61 s
Verdict explain(const Merge& merge);

/// Where one rank stands.
struct Standing {
  int rank = 0;
  std::string call{};   ///< what it waits in, or else entered last, with group, shape and dtype; empty without any
  std::string state{};  ///< waits, in flight, enqueued, failed, outside, left the world, no record
  double for_s = 0;     ///< how long it has waited, or been outside
  std::string site{};
  double silent_s = 0;  ///< between its last sign of life and the last one of any rank
};

/// Every rank of the world, in order.
std::vector<Standing> standings(const Merge& merge);

/// One line a rank under a line of titles.
std::string table(const std::vector<Standing>& standings);

const char* name_of(Verdict::Kind kind);

}  // namespace tessera::comm::flight
