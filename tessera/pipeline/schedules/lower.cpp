// Adds messages to the lists. The schedule is simulated; every computation whose result goes to another rank ends at some time, and there its message happens:
// the sender's list has the send behind that computation, the receiver's the receive behind all that it began before. Computations by the time of their start
// and messages by the time of their sender's end are then one sequence in which everything is possible at its turn, even where a message takes both ranks'
// time: nobody can wait in a circle.

#include "tessera/pipeline/schedules/lower.h"

#include <algorithm>
#include <set>
#include <tuple>

#include "tessera/core/error.h"
#include "tessera/pipeline/schedules/events.h"

namespace tessera::schedules {
namespace {

using enum Kind;

/// The sends that carry an action's results to other ranks.
std::vector<Action> sends_of(const Schedule& schedule, const Action& action) {
  std::vector<Action> sends;
  for (const auto& event : detail::brings(action)) {
    const Action send{.kind = event.kind == Forward ? SendForward : SendBackward, .stage = event.stage, .micro_batch = event.micro_batch};
    if (event.kind == Forward && !schedule.is_last(event.stage) && !schedule.same_rank(event.stage, event.stage + 1)) sends.push_back(send);
    if (event.kind == BackwardInput && !schedule.is_first(event.stage) && !schedule.same_rank(event.stage, event.stage - 1)) sends.push_back(send);
  }
  return sends;
}

/// The lists with their messages, all put where the one sequence has them.
std::vector<RankActions> with_messages(const Schedule& schedule, const Costs& costs) {
  const Timeline timeline = simulate(schedule, costs);
  // At equal times messages come first: a computation that begins there may wait for them. Those of a rank that begin at one time (some cost nothing) keep
  // their order.
  enum Turn { Message, Computation };
  std::vector<std::tuple<double, Turn, int, size_t>> sequence;  // time, turn, rank, position
  for (int rank = 0; rank < schedule.ranks(); ++rank) {
    for (size_t i = 0; i < timeline[rank].size(); ++i) {
      sequence.emplace_back(timeline[rank][i].start, Computation, rank, i);
      if (!sends_of(schedule, schedule.actions[rank][i]).empty()) sequence.emplace_back(timeline[rank][i].end, Message, rank, i);
    }
  }
  std::ranges::sort(sequence);
  std::vector<RankActions> lists(schedule.ranks());
  for (const auto& [time, turn, rank, position] : sequence) {
    const Action& action = schedule.actions[rank][position];
    if (turn == Computation) {
      lists[rank].push_back(action);
      continue;
    }
    for (const Action& send : sends_of(schedule, action)) {
      lists[rank].push_back(send);
      lists[detail::peer(schedule, send)].push_back(detail::receive_of(send));
    }
  }
  return lists;
}

/// Moves each receive before up to `ahead` computations, behind messages that precede it: the order of messages stays.
RankActions begin_receives_ahead(const RankActions& actions, int ahead) {
  RankActions moved;
  for (const Action& action : actions) {
    size_t at = moved.size();
    for (int passed = 0; action.receives() && at > 0 && moved[at - 1].computes() && passed < ahead; ++passed) --at;
    moved.insert(moved.begin() + static_cast<std::ptrdiff_t>(at), action);
  }
  return moved;
}

/// Behind the last backward of each stage; where weights change in the midst of a step, before each update.
RankActions with_reductions(const Schedule& schedule, const RankActions& actions) {
  const bool before_updates = schedule.is_asynchronous();
  std::vector<int> done(schedule.stages());
  RankActions reduced;
  for (const Action& action : actions) {
    if (action.kind == Update) reduced.push_back({.kind = ReduceGrad, .stage = action.stage});
    reduced.push_back(action);
    for (const auto& event : detail::brings(action)) {
      const bool last = event.kind == BackwardWeight && ++done[event.stage] == schedule.micro_batches;
      if (last && !before_updates) reduced.push_back({.kind = ReduceGrad, .stage = event.stage});
    }
  }
  return reduced;
}

/// The first `count` different stages that computations from `begin` on use.
std::set<int> next_stages(const RankActions& actions, size_t begin, int count) {
  std::set<int> stages;
  for (size_t i = begin; i < actions.size() && static_cast<int>(stages.size()) < count; ++i) {
    if (!actions[i].computes()) continue;
    for (const Action& part : parts(actions[i])) stages.insert(part.stage);
  }
  return stages;
}

RankActions with_gathering(const RankActions& actions, int count) {
  std::set<int> gathered;
  RankActions sharded;
  for (size_t i = 0; i < actions.size(); ++i) {
    if (actions[i].computes()) {
      const auto wanted = next_stages(actions, i, count);
      for (auto it = gathered.begin(); it != gathered.end();) {
        if (wanted.contains(*it)) {
          ++it;
          continue;
        }
        sharded.push_back({.kind = Reshard, .stage = *it});
        it = gathered.erase(it);
      }
      for (const int stage : wanted) {
        if (gathered.insert(stage).second) sharded.push_back({.kind = Unshard, .stage = stage});
      }
    }
    sharded.push_back(actions[i]);
  }
  for (const int stage : gathered) sharded.push_back({.kind = Reshard, .stage = stage});
  return sharded;
}

}  // namespace

Schedule lower(const Schedule& schedule, const Lowering& lowering) {
  invariant(!schedule.is_lowered(), "schedule ", schedule.name, " has its messages already");
  invariant(lowering.costs.forward > 0 && lowering.costs.backward_input > 0, "messages are ordered by costs that take no time");
  Schedule lowered = schedule;
  lowered.actions = with_messages(schedule, lowering.costs);
  for (auto& actions : lowered.actions) {
    actions = begin_receives_ahead(actions, lowering.ahead);
    if (lowering.unsharded_stages > 0) actions = with_gathering(actions, lowering.unsharded_stages);
    if (lowering.reduce_gradients) actions = with_reductions(schedule, actions);
  }
  return lowered;
}

}  // namespace tessera::schedules
