#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "tessera/comm/algorithms/message_plan.h"

namespace tessera::comm {

/// What a plan does, found by carrying it out on symbols instead of numbers.
struct Simulation {
  int steps = 0;                             ///< that anything happens in, from the first to the last
  std::vector<int64_t> sent_elements{};      ///< by each rank
  std::vector<int64_t> messages{};           ///< sent by each rank
  std::vector<std::string> order_of_sums{};  ///< of each chunk of an op that reduces, as "((1+2)+3)+0": ranks in the order in which they are added
  int64_t most_sent() const;
};

/// Proves a plan for tensors of `elements` elements (the whole, as in traffic.h; a multiple of the ranks where an op has equal parts):
///   - in every step, what rank a sends to b is what b receives from a, chunk by chunk and in the same order; so the plan cannot deadlock where a step's sends
///     and receives are posted together;
///   - a rank sends only what it holds, no contribution is added twice, and nothing that a step sends or receives depends on the order inside of the step;
///   - in the end every rank holds what the op promises, and of a sum the very same expression (addition commutes bit by bit, but does not associate): so all
///     ranks get the same bits;
///   - for barrier, that no rank can leave before all have come.
/// Throws InternalError with step, rank and chunk where one of these fails. Time of the order of messages x ranks.
Simulation simulate(const MessagePlan& plan, int64_t elements);

}  // namespace tessera::comm
