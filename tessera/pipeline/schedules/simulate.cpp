#include "tessera/pipeline/schedules/simulate.h"

#include <algorithm>
#include <limits>
#include <map>

#include "tessera/core/error.h"
#include "tessera/pipeline/schedules/events.h"

// When each action of a schedule would begin and end, with given times for F, B, I and W of each stage and for a message. Every rank does its actions in
// order, and each begins when the rank is free and what it needs has come; a sweep over the ranks until none moves gives the one solution. Idle time, bubble,
// activations and versions of weights held at a time are read off the result.

namespace tessera::schedules {
namespace {

constexpr double kNotYet = -1;

/// When the last of what an action needs is on its rank; kNotYet where some of it has not happened.
double ready_at(const Schedule& schedule, const Action& action, const detail::EventIndex& index, const std::vector<double>& done, double communication) {
  double ready = 0;
  for (const auto& event : detail::needs(schedule, action, /*through_messages=*/false)) {
    const double end = done[index(event)];
    if (end == kNotYet) return kNotYet;
    const int from = schedule.rank_of[event.stage], to = schedule.rank_of[action.stage];
    ready = std::max(ready, end + (from == to ? 0 : communication));
  }
  return ready;
}

/// The most that covers one position at once, of intervals from first to last position.
int most_at_once(const std::vector<std::pair<size_t, size_t>>& intervals, size_t positions) {
  std::vector<int> change(positions + 1);
  for (const auto& [first, last] : intervals) {
    ++change[first];
    --change[last + 1];
  }
  int now = 0, most = 0;
  for (const int difference : change) most = std::max(most, now += difference);
  return most;
}

/// How many versions of its weights a stage holds at most: each from the update that makes it until its last use.
int versions_held(const RankActions& actions, int stage) {
  std::map<int, std::pair<size_t, size_t>> held{{0, {0, 0}}};
  for (size_t i = 0; i < actions.size(); ++i) {
    for (const Action& part : parts(actions[i])) {
      if (part.stage != stage) continue;
      if (part.kind == Kind::Update) held[part.version] = {i, i};
      if (part.computes()) held[part.version].second = i;
    }
  }
  std::vector<std::pair<size_t, size_t>> intervals;
  for (const auto& [version, interval] : held) intervals.push_back(interval);
  return most_at_once(intervals, actions.size());
}

double duration_of(const Action& action, const std::vector<StageCosts>& stages) {
  double sum = 0;
  for (const Action& part : parts(action)) {
    if (!part.occupies()) continue;
    const StageCosts& cost = stages[part.stage];
    sum += part.kind == Kind::Forward         ? cost.forward
           : part.kind == Kind::Backward      ? cost.backward
           : part.kind == Kind::BackwardInput ? cost.backward_input
           : part.kind == Kind::Update        ? cost.update
                                              : cost.backward_weight;
  }
  return sum;
}

}  // namespace

double duration(const Action& action, const Costs& costs) {
  if (!costs.stages.empty()) return duration_of(action, costs.stages);
  const auto scaled = [&](int stage, double cost) { return costs.scale.empty() ? cost : cost * costs.scale[stage]; };
  switch (action.kind) {
    case Kind::Forward:
      return scaled(action.stage, costs.forward);
    case Kind::Backward:
      return scaled(action.stage, costs.backward_input + costs.backward_weight);
    case Kind::BackwardInput:
      return scaled(action.stage, costs.backward_input);
    case Kind::BackwardWeight:
      return scaled(action.stage, costs.backward_weight);
    case Kind::Overlap:
      if (costs.overlap > 0) return (scaled(action.stage, costs.overlap) + scaled(action.backward_stage, costs.overlap)) / 2;
      return scaled(action.stage, costs.forward) + scaled(action.backward_stage, costs.backward_input + costs.backward_weight);
    default:
      return 0;
  }
}

Timeline simulate(const Schedule& schedule, const Costs& costs) {
  const detail::EventIndex index(schedule);
  std::vector<double> done(index.size(), kNotYet);
  Timeline timeline(schedule.ranks());
  // Forwards go from rank to rank upwards and backwards downwards: rounds go both ways in turns, or each backward would take a round a rank.
  bool upwards = false;
  for (bool progress = true; progress;) {
    progress = false;
    upwards = !upwards;
    for (int i = 0; i < schedule.ranks(); ++i) {
      const int rank = upwards ? i : schedule.ranks() - 1 - i;
      const auto& actions = schedule.actions[rank];
      auto& spans = timeline[rank];
      while (spans.size() < actions.size()) {
        const Action& action = actions[spans.size()];
        const double ready = action.occupies() ? ready_at(schedule, action, index, done, costs.communication) : 0;
        if (ready == kNotYet) break;
        const double start = std::max(ready, spans.empty() ? 0 : spans.back().end), end = start + duration(action, costs);
        spans.push_back({start, end});
        for (const auto& event : detail::brings(action)) done[index(event)] = end;
        progress = true;
      }
    }
  }
  for (int rank = 0; rank < schedule.ranks(); ++rank)
    invariant(timeline[rank].size() == schedule.actions[rank].size(), "a schedule that cannot end was simulated: rank ", rank, " stands still");
  return timeline;
}

Measures measure(const Schedule& schedule, const Timeline& timeline) {
  Measures measures;
  double first = std::numeric_limits<double>::infinity(), last = 0, busy = 0, most_busy = 0, longest = 0;
  for (int rank = 0; rank < schedule.ranks(); ++rank) {
    double own_first = std::numeric_limits<double>::infinity(), own_last = 0, own_busy = 0;
    for (size_t i = 0; i < timeline[rank].size(); ++i) {
      if (!schedule.actions[rank][i].occupies()) continue;
      const Span& span = timeline[rank][i];
      own_first = std::min(own_first, span.start);
      own_last = std::max(own_last, span.end);
      own_busy += span.end - span.start;
    }
    first = std::min(first, own_first);
    last = std::max(last, own_last);
    busy += own_busy;
    most_busy = std::max(most_busy, own_busy);
    longest = std::max(longest, own_last - own_first);
    measures.peak_activations.push_back(static_cast<double>(most_alive(schedule, rank)) / schedule.chunks(rank));
    int versions = 1;
    for (const int stage : schedule.stages_of(rank)) versions = std::max(versions, versions_held(schedule.actions[rank], stage));
    measures.weight_versions.push_back(versions);
  }
  measures.makespan = last - first;
  const double whole = measures.makespan * schedule.ranks();
  if (whole > 0) measures.bubble_fraction = std::max(0.0, 1 - busy / whole);
  if (busy > 0) measures.bubble_over_ideal = std::max(0.0, whole / busy - 1);
  if (longest > 0) measures.span_bubble_rate = std::max(0.0, 1 - most_busy / longest);
  return measures;
}

}  // namespace tessera::schedules
