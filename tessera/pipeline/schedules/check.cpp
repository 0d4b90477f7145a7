#include "tessera/pipeline/schedules/check.h"

#include <algorithm>
#include <set>

#include <fmt/format.h>

#include "tessera/core/error.h"
#include "tessera/pipeline/schedules/events.h"
#include "tessera/pipeline/schedules/progress.h"

// What makes a list of actions a schedule: every stage is held by a rank and does each forward and backward of each micro-batch once, none of it before what
// it needs, none of it forgotten, and no rank waits for another that waits for it (schedules/progress.cpp). A schedule that passes computes the gradients of
// the step, in whatever order, so the executor need not know where it came from: a generator, or a user's file.

namespace tessera::schedules {
namespace {

using enum Kind;
using detail::Event;

using Found = std::optional<Problem>;

/// Goes over every action of every rank until `look(rank, position, action)` finds a problem.
Found first_of(const Schedule& schedule, auto&& look) {
  for (int rank = 0; rank < schedule.ranks(); ++rank) {
    for (size_t i = 0; i < schedule.actions[rank].size(); ++i) {
      if (auto what = look(rank, static_cast<int>(i), schedule.actions[rank][i]); !what.empty()) return Problem{rank, static_cast<int>(i), what};
    }
  }
  return std::nullopt;
}

Found misplaced(const Schedule& schedule) {
  for (int stage = 0; stage < schedule.stages(); ++stage) {
    if (schedule.rank_of[stage] < 0 || schedule.rank_of[stage] >= schedule.ranks()) return Problem{.what = fmt::format("stage {} is held by no rank", stage)};
  }
  return first_of(schedule, [&](int rank, int, const Action& action) -> std::string {
    for (const Action& part : parts(action)) {
      if (part.stage < 0 || part.stage >= schedule.stages()) return fmt::format("{}: there are stages 0 to {}", to_string(action), schedule.stages() - 1);
      if (schedule.rank_of[part.stage] != rank)
        return fmt::format("{}: stage {} is held by rank {}", to_string(action), part.stage, schedule.rank_of[part.stage]);
      const bool outside = part.has_micro_batch() && (part.micro_batch < 0 || part.micro_batch >= schedule.micro_batches);
      if (outside) return fmt::format("{}: there are micro-batches 0 to {}", to_string(action), schedule.micro_batches - 1);
    }
    return {};
  });
}

/// Whether a message of this kind crosses ranks at this stage.
bool crosses(const Schedule& schedule, Kind kind, int stage) {
  const bool behind = kind == SendForward || kind == ReceiveBackward;
  const int other = stage + (behind ? 1 : -1);
  return other >= 0 && other < schedule.stages() && !schedule.same_rank(stage, other);
}

Found repeated_or_needless(const Schedule& schedule, std::vector<int>& times) {
  const detail::EventIndex index(schedule);
  return first_of(schedule, [&](int, int, const Action& action) -> std::string {
    if ((action.sends() || action.receives()) && !crosses(schedule, action.kind, action.stage))
      return fmt::format("{}: its other end is on no other rank", to_string(action));
    for (const Event& event : detail::brings(action)) {
      if (times[index(event)]++ > 0) return to_string(action) + " is done a second time";
    }
    return {};
  });
}

Found forgotten(const Schedule& schedule, const std::vector<int>& times) {
  const detail::EventIndex index(schedule);
  std::vector<Kind> kinds{Forward, BackwardInput, BackwardWeight};
  if (schedule.is_lowered()) kinds.insert(kinds.end(), {SendForward, ReceiveForward, SendBackward, ReceiveBackward});
  for (int stage = 0; stage < schedule.stages(); ++stage) {
    for (const Kind kind : kinds) {
      if (kind > BackwardWeight && !crosses(schedule, kind, stage)) continue;
      for (int micro_batch = 0; micro_batch < schedule.micro_batches; ++micro_batch) {
        const Event event{kind, stage, micro_batch};
        if (times[index(event)] > 0) continue;
        const auto text = [&](Kind named) { return to_string(Action{.kind = named, .stage = stage, .micro_batch = micro_batch}); };
        const bool no_backward = kind == BackwardInput && times[index({BackwardWeight, stage, micro_batch})] == 0;
        return Problem{.rank = schedule.rank_of[stage], .what = text(no_backward ? Backward : kind) + " is missing"};
      }
    }
  }
  return std::nullopt;
}

/// Gradients are reduced once a stage has all of them, parameters are gathered where they are used.
Found sharding(const Schedule& schedule) {
  std::set<int> gathers, gathered, reduced;
  const bool reduces_once = !schedule.is_asynchronous();
  first_of(schedule, [&](int, int, const Action& action) -> std::string {
    if (action.kind == Unshard) gathers.insert(action.stage);
    return {};
  });
  return first_of(schedule, [&](int, int, const Action& action) -> std::string {
    if (action.kind == Unshard && !gathered.insert(action.stage).second) return to_string(action) + ": the stage is unsharded already";
    if (action.kind == Reshard && gathered.erase(action.stage) == 0) return to_string(action) + ": the stage is not unsharded";
    if (action.kind == ReduceGrad && reduces_once && !reduced.insert(action.stage).second) return to_string(action) + " is done a second time";
    if (!action.computes()) return {};
    for (const Action& part : parts(action)) {
      const bool uses = part.kind != BackwardWeight;  // made of inputs and of outputs' gradients alone
      if (uses && gathers.contains(part.stage) && !gathered.contains(part.stage))
        return fmt::format("{}: stage {} is not unsharded", to_string(action), part.stage);
      if (part.kind != Forward && reduced.contains(part.stage))
        return fmt::format("{}: the gradients of stage {} are reduced already", to_string(action), part.stage);
    }
    return {};
  });
}

Found versions(const Schedule& schedule) {
  std::vector<int> updates(schedule.stages()), used(static_cast<size_t>(schedule.stages()) * schedule.micro_batches);
  return first_of(schedule, [&](int, int, const Action& action) -> std::string {
    for (const Action& part : parts(action)) {
      if (part.kind == Update && part.version != ++updates[part.stage])
        return fmt::format("{}: it is update {} of stage {}", to_string(part), updates[part.stage], part.stage);
      if (!part.computes()) continue;
      int& version = used[static_cast<size_t>(part.stage) * schedule.micro_batches + part.micro_batch];
      if (part.kind == Forward) {
        version = part.version;
        if (version > updates[part.stage]) return fmt::format("{}: stage {} has had {} updates", to_string(part), part.stage, updates[part.stage]);
      } else if (part.version != version) {
        return fmt::format("{}: its forward used version {}", to_string(part), version);
      }
    }
    return {};
  });
}

}  // namespace

std::optional<Problem> find_problem(const Schedule& schedule, Messages messages) {
  if (auto found = misplaced(schedule)) return found;
  std::vector<int> times(detail::EventIndex(schedule).size());
  if (auto found = repeated_or_needless(schedule, times)) return found;
  if (auto found = forgotten(schedule, times)) return found;
  if (auto found = detail::Progress(schedule, messages).run()) return found;
  if (auto found = sharding(schedule)) return found;
  return versions(schedule);
}

void check(const Schedule& schedule, Messages messages) {
  if (const auto problem = find_problem(schedule, messages))
    throw InternalError(fmt::format("internal error: schedule {} of {} ranks and {} micro-batches, rank {}: {}", schedule.name, schedule.ranks(),
                                    schedule.micro_batches, problem->rank, problem->what));
}

}  // namespace tessera::schedules
