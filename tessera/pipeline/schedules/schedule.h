#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

/// Pipeline schedules as values: what every rank of a pipeline does, in which order. Pure functions make them (generators.h), prove them (check.h), foretell
/// what they cost (simulate.h), add messages (lower.h), read and write them (csv.h) and draw them (picture.h); an engine carries out one rank's list.
///
/// p ranks, v chunks a rank, p v stages, m micro-batches. A *stage* is a piece of the whole model, 0 .. p v - 1 from its input to its output, whichever rank
/// holds it; with v > 1 some call it virtual stage.
namespace tessera::schedules {

enum class Kind : uint8_t {
  Forward,          ///< F: of a micro-batch through a stage
  Backward,         ///< B: gradients of inputs and of weights
  BackwardInput,    ///< I: of inputs alone, which is all that the stage before waits for (arXiv:2401.10241, which calls it B)
  BackwardWeight,   ///< W: of weights, that BackwardInput has left for later
  SendForward,      ///< SEND_F: a stage's output, to the rank of the stage behind it
  ReceiveForward,   ///< RECV_F: a stage's input, from the rank of the stage before it
  SendBackward,     ///< SEND_B: the gradient of a stage's input, to the rank of the stage before it
  ReceiveBackward,  ///< RECV_B: the gradient of a stage's output, from the rank of the stage behind it
  Unshard,          ///< UNSHARD: gathers a stage's sharded parameters
  Reshard,          ///< RESHARD: lets go of what Unshard gathered
  ReduceGrad,       ///< REDUCE_GRAD: a stage's gradients over the data ranks
  Update,           ///< UPDATE: the optimizer, on a stage, in the middle of an asynchronous schedule (synchronous ones end where the step updates)
  Overlap           ///< OVERLAP_F_B: a forward and a backward that run together, of two stages of one rank
};

/// "forward", "backward of inputs": as pictures, errors and verdicts name it.
std::string_view words_of(Kind kind);

/// One thing that a rank does.
struct Action {
  Kind kind = Kind::Forward;
  int stage = 0;
  int micro_batch = 0;      ///< of the step, from 0; 0 where a kind has none: see has_micro_batch()
  int backward_stage = -1;  ///< of Overlap alone: `stage` and `micro_batch` are its forward's, these its backward's
  int backward_micro_batch = -1;
  int version = 0;  ///< of the weights it computes with, counted in updates of its stage; 0 in every synchronous schedule

  bool operator==(const Action&) const = default;
  /// Whether it is F, B, I, W or an overlap of two of them.
  bool computes() const { return kind <= Kind::BackwardWeight || kind == Kind::Overlap; }
  /// Whether its rank does nothing else meanwhile: a computation, or an update.
  bool occupies() const { return computes() || kind == Kind::Update; }
  bool sends() const { return kind == Kind::SendForward || kind == Kind::SendBackward; }
  bool receives() const { return kind == Kind::ReceiveForward || kind == Kind::ReceiveBackward; }
  bool has_micro_batch() const { return kind <= Kind::ReceiveBackward || kind == Kind::Update; }
};

/// The two halves of an overlap; of any other action, itself. Every pass that asks what is computed goes through this.
std::vector<Action> parts(const Action& action);

/// "2F0", "3SEND_F1", "2UNSHARD", "(0F7;7B3)OVERLAP_F_B": PyTorch's text. Ours adds "@1", the version of the weights, where it is not 0, and UPDATE.
std::string to_string(const Action& action);
/// Reads it again. Throws ConfigError, which names the text and what it should look like.
Action parse_action(std::string_view text);

/// One rank's actions of a step, in their order.
using RankActions = std::vector<Action>;

struct Schedule {
  std::string name;                  ///< of the generator, or the file it was read from
  int micro_batches = 0;             ///< m
  std::vector<int> rank_of;          ///< which rank holds a stage, for each stage
  std::vector<RankActions> actions;  ///< for each rank

  bool operator==(const Schedule&) const = default;

  int ranks() const { return static_cast<int>(actions.size()); }   ///< p
  int stages() const { return static_cast<int>(rank_of.size()); }  ///< p v
  std::vector<int> stages_of(int rank) const;                      ///< in ascending order
  int chunks(int rank) const;                                      ///< v: how many stages it holds
  bool is_first(int stage) const { return stage == 0; }
  bool is_last(int stage) const { return stage == stages() - 1; }
  /// The neighbour's output, or its gradient, is here already: nothing is sent between stages of one rank.
  bool same_rank(int stage, int other) const { return rank_of[stage] == rank_of[other]; }
  /// Whether weights change in the middle of it (PipeDream).
  bool is_asynchronous() const;
  /// Whether some backward is cut into its two halves.
  bool splits_backward() const;
  /// Whether it holds messages (lower.h), without which an engine cannot run more than one rank.
  bool is_lowered() const;
};

/// Which rank holds which of p v stages: stage mod p (arXiv:2104.04473).
std::vector<int> loop_placement(int ranks, int chunks);
/// Down and up in turns (0 1 2 2 1 0 for p = 3, v = 2): the first and the last stage of v = 2 meet on rank 0 (arXiv:2401.10241, 2405.15362).
std::vector<int> v_placement(int ranks, int chunks);

/// When the gradients of weights are computed.
enum class WeightGradients : uint8_t {
  InBackward,
  BehindBackward,  ///< in an action of their own, right behind it
  AtTheEnd  ///< behind all others of the rank: the most that a schedule can gain by it, at the price of holding what they are made of for all micro-batches
};

/// The schedule with each full backward (no part of an overlap) cut in two, and the weights' half where `when` says.
Schedule with_weight_gradients(Schedule schedule, WeightGradients when);

/// The schedule with every backward of a stage cut in two where some of that stage's are, the weights' half right behind the other: the same order of
/// computations, in which the last half of either kind is the last that brings a stage gradients. Overlaps with such a backward become their parts.
Schedule with_backwards_alike(Schedule schedule);

/// How many micro-batches are alive at most on `rank`, in stages of its own: from their forward to the end of their backward, weights included.
/// A rank with v chunks counts a micro-batch once for each, so divide by chunks(rank) for micro-batches of its whole share.
int most_alive(const Schedule& schedule, int rank);

/// The lists below one another, one rank a line: "rank 0: 0F0 0F1 0B0 ...".
std::string to_string(const Schedule& schedule);

}  // namespace tessera::schedules
