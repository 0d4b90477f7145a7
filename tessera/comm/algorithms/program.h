#pragma once

#include <cstdint>
#include <vector>

#include "tessera/comm/algorithms/message_plan.h"

namespace tessera::comm {

struct Call;

/// A piece of memory of a call, in elements.
struct Region {
  enum class Place { None, Input, Output, Scratch };
  Place place = Place::None;
  int index = 0;  ///< which of the call's input or output tensors
  int64_t begin = 0;
  int64_t size = 0;
  bool operator==(const Region&) const = default;
};

/// `to` <- `from`, or with `reduce` `to` <- `with` (+) `from`; all of a size. `with` may be `to`.
struct Move {
  Region from, to, with{};
  bool reduce = false;
  bool from_first = false;  ///< `from` (+) `with`: two ranks that exchange take the lower one's first, or +0 and -0 would have no common minimum
};

/// Memory that a message comes from or goes to.
struct Post {
  int peer = -1;
  Region region;
};

/// What a rank does in a step: packs what lies scattered, posts receives and sends together, waits for them, and puts in place or adds what came.
struct ProgramStep {
  std::vector<Move> pack;
  std::vector<Post> receives, sends;
  std::vector<Move> unpack;
};

/// One rank's part of a plan, told to the memory of one call.
struct Program {
  std::vector<ProgramStep> steps;
  std::vector<Move> finish;      ///< this rank's own data, where it has not moved
  int64_t scratch_elements = 0;  ///< in one piece: what is held for others, and a step's staging
  bool tokens = false;           ///< messages carry one byte that means nothing (barrier)
};

/// Places a plan's rows in a call's tensors. Data is sent from where it lies and received where it belongs, without a copy, wherever a message is one piece of
/// memory that the step does not send too; what is added is received into scratch first. Scratch of all_reduce, in elements of a whole S on n ranks: ring S/n,
/// bidirectional ring 2 S/n, recursive doubling and binomial tree S, halving-doubling S/2 (S with a guest), double tree S/segments; of reduce_scatter: ring S,
/// pairwise S/n.
/// Throws InternalError where the call is not what the request says.
Program make_program(const MessagePlanRequest& request, int rank, const Call& call);

}  // namespace tessera::comm
