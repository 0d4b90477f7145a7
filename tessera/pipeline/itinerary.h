#pragma once

#include <vector>

#include "tessera/pipeline/schedules/schedule.h"
#include "tessera/pipeline/stage.h"

namespace tessera::pipeline {

/// A value of one micro-batch, or the gradient of one, on its way between two ranks.
struct Message {
  int crossing = 0;  ///< index in Crossings
  int micro_batch = 0;
  bool gradient = false;
  int peer = 0;  ///< the other rank

  bool operator==(const Message&) const = default;
};

/// One action that computes or updates, with the messages around it.
struct Leg {
  schedules::Action action;
  std::vector<Message> posts;  ///< to be received, posted before it: what it needs itself, and what the next that computes needs
  std::vector<Message> needs;  ///< of what has been posted, by now or before
  std::vector<Message> sends;  ///< what it makes for other ranks
};

/// What one rank of a schedule does. Messages follow from what computes and from what crosses, so a schedule that holds some (is_lowered) gives the same. The
/// receives of a pair of ranks are posted in the order in which the other sends, for engines that match messages by their order alone. Throws InternalError
/// where an action needs what nobody sends.
std::vector<Leg> itinerary(const schedules::Schedule& schedule, const Crossings& crossings, int rank);

}  // namespace tessera::pipeline
