#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "tessera/nn/gradient_synchronizer.h"

namespace tessera {

/// One thing that an engine does with one of a rank's micro-batches.
struct Action {
  ActionKind kind;
  size_t micro_batch = 0;  ///< of this rank's in the step, from 0
  bool operator==(const Action&) const = default;
};

/// The order of a rank's actions in a step: a plain value. Forwards come in the order of the micro-batches, backwards too, each after its forward, weight
/// gradients (of all micro-batches, or of none) after their backward.
using Schedule = std::vector<Action>;

/// F0 B0 F1 B1 ...: one micro-batch after the other, and the memory of one.
Schedule one_after_the_other(size_t micro_batches);

/// When weight gradients are computed.
enum class WeightGradientTime {
  InBackward,
  BehindBackward,  ///< in an action of their own, right behind it
  AtTheEnd         ///< behind all others: the most that a schedule can gain by it, at the price of holding what they are made of for all micro-batches
};

/// 1F1B as stage `stage` of `stages` has it (PipeDream-Flush, arXiv:2006.09503, arXiv:2104.04473): stages - 1 - stage forwards run ahead, then a forward and a
/// backward take turns. At most stages - stage micro-batches are alive. Throws InternalError for a stage that does not exist.
Schedule one_f_one_b(size_t micro_batches, int stage, int stages, WeightGradientTime weights = WeightGradientTime::InBackward);

/// All forwards, then all backwards (GPipe, arXiv:1811.06965).
Schedule all_forward_all_backward(size_t micro_batches);

/// How many micro-batches are alive at most: between their forward and the end of their backward.
size_t most_alive(const Schedule& schedule);

/// Throws InternalError unless the schedule does what Schedule says, with each of `micro_batches`, once.
void check_schedule(const Schedule& schedule, size_t micro_batches);

/// "F0 F1 B0 F2 B1 B2 W0 W1 W2".
std::string to_string(const Schedule& schedule);

}  // namespace tessera
