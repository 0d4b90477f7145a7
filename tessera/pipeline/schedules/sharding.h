#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <tuple>

#include "tessera/pipeline/schedules/schedule.h"

namespace tessera::schedules {

/// How long a stage stays whole whose parameters are sharded over data ranks: gathers and memory are two ends of one rope.
///
///           gathers of a unit in a step                                         whole at once
///   Pass    2 m: in every forward and in every backward                         the unit in use, and those fetched ahead
///   Row     1 or 2 where all forwards of a stage come in a row (breadth-first)   the rank's stage at hand
///   Step    1                                                                   all stages of the rank
enum class Gathered : uint8_t {
  Pass,  ///< units come and go within each action
  Row,   ///< through actions of one stage that follow each other on its rank
  Step   ///< from the first to the last use
};

/// What a run that frees parameters after a forward does by this schedule: rows where ranks hold several stages and take each stage's forwards, and its
/// backwards, one behind the other, so that a row saves gathers and holds one of v stages; passes elsewhere.
Gathered gathered_while_reshards(const Schedule& schedule);

/// The schedule with Unshard before and Reshard behind what `until` says; none for Pass. One that has such actions already says itself, and stays as it is.
Schedule with_gathers(Schedule schedule, Gathered until);

/// What an action's rank does behind it, as far as sharded parameters mind. Gradients of weights need none.
struct Outlook {
  std::optional<Action> coming;  ///< the next forward or backward, of any stage
  bool stays = false;            ///< the stage is used again before its Reshard
};

/// By stage, kind and micro-batch: of each computation in one rank's list, the halves of an overlap by themselves.
using Outlooks = std::map<std::tuple<int, Kind, int>, Outlook>;
Outlooks outlooks(const RankActions& actions);

}  // namespace tessera::schedules
