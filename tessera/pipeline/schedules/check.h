#pragma once

#include <optional>
#include <string>

#include "tessera/pipeline/schedules/schedule.h"

namespace tessera::schedules {

/// What is wrong with a schedule, and where.
struct Problem {
  int rank = -1;      ///< whose list
  int position = -1;  ///< in that list; -1: of no single action (one that is missing)
  std::string what{};
};

/// How an engine's messages behave.
enum class Messages {
  /// A send or a receive is begun and the list goes on; computations wait for what they use. Messages between two ranks are completed in the order in which
  /// both began them, as NCCL does; engines that match by tag ask for less.
  Posted,
  /// A send waits for its receive, and a receive for its send.
  Rendezvous
};

/// The first problem of a schedule, if any. Proves that
///   every stage has its forward and its backward, whole or in two halves, of every micro-batch once, on the rank that holds it;
///   where there are messages, each output and gradient that another rank needs is sent and received once, and no other;
///   ranks that carry out their lists in order come to the end: nothing is used before it is there, and nobody waits in a circle, whose actions are printed;
///   a stage's gradients are reduced behind its last backward, and it computes between its unshard and reshard, where there are such;
///   versions of weights exist when a forward uses them, and a backward uses its forward's.
std::optional<Problem> find_problem(const Schedule& schedule, Messages messages = Messages::Posted);

/// Throws InternalError where there is one: for schedules that this library made.
void check(const Schedule& schedule, Messages messages = Messages::Posted);

}  // namespace tessera::schedules
