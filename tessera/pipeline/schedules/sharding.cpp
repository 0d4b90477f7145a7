#include "tessera/pipeline/schedules/sharding.h"

#include <algorithm>
#include <iterator>
#include <set>
#include <utility>
#include <vector>

// A list is read from its end: what comes behind an action is known by the time it is met.

namespace tessera::schedules {
namespace {

using enum Kind;

bool uses_parameters(const Action& action) { return action.kind == Forward || action.kind == Backward || action.kind == BackwardInput; }

/// The stages that an entry of a list uses.
std::set<int> used_by(const Action& action) {
  std::set<int> stages;
  for (const Action& part : parts(action)) {
    if (uses_parameters(part)) stages.insert(part.stage);
  }
  return stages;
}

/// How often a stage's passes of one direction begin behind something else.
int rows_of(const RankActions& actions, int stage, bool forward) {
  int rows = 0;
  bool within = false;
  for (const Action& listed : actions) {
    for (const Action& part : parts(listed)) {
      if (!uses_parameters(part)) continue;
      const bool same = part.stage == stage && (part.kind == Forward) == forward;
      rows += same && !within ? 1 : 0;
      within = same;
    }
  }
  return rows;
}

/// Around the whole of a stage's uses, or around each row of them.
RankActions with_gathers(const RankActions& actions, bool rows) {
  std::vector<std::set<int>> used;
  for (const Action& action : actions) used.push_back(used_by(action));
  // Behind which entry a stage goes: the last that uses it, or the last before one that uses others alone.
  std::vector<std::set<int>> let_go(actions.size());
  std::set<int> needed;
  for (size_t i = actions.size(); i-- > 0;) {
    if (used[i].empty()) continue;
    std::ranges::set_difference(used[i], needed, std::inserter(let_go[i], let_go[i].end()));
    if (rows) needed = used[i];
    needed.insert(used[i].begin(), used[i].end());
  }
  RankActions gathering;
  std::set<int> gathered;
  for (size_t i = 0; i < actions.size(); ++i) {
    for (const int stage : used[i]) {
      if (gathered.insert(stage).second) gathering.push_back({.kind = Unshard, .stage = stage});
    }
    gathering.push_back(actions[i]);
    for (const int stage : let_go[i]) {
      gathering.push_back({.kind = Reshard, .stage = stage});
      gathered.erase(stage);
    }
  }
  return gathering;
}

}  // namespace

Gathered gathered_while_reshards(const Schedule& schedule) {
  for (int rank = 0; rank < schedule.ranks(); ++rank) {
    const std::vector<int> stages = schedule.stages_of(rank);
    const RankActions& actions = schedule.actions[static_cast<size_t>(rank)];
    const auto in_rows = [&](int stage) { return rows_of(actions, stage, true) <= 1 && rows_of(actions, stage, false) <= 1; };
    if (stages.size() < 2 || !std::ranges::all_of(stages, in_rows)) return Gathered::Pass;
  }
  return Gathered::Row;
}

Schedule with_gathers(Schedule schedule, Gathered until) {
  const auto says_itself = [](const RankActions& actions) { return std::ranges::any_of(actions, [](const Action& a) { return a.kind == Unshard; }); };
  if (until == Gathered::Pass || std::ranges::any_of(schedule.actions, says_itself)) return schedule;
  for (RankActions& actions : schedule.actions) actions = with_gathers(actions, until == Gathered::Row);
  return schedule;
}

Outlooks outlooks(const RankActions& actions) {
  Outlooks seen;
  std::set<int> again;  // stages that are used behind the action at hand, and unsharded until then
  std::optional<Action> coming;
  for (size_t i = actions.size(); i-- > 0;) {
    const Action& action = actions[i];
    if (action.kind == Reshard || action.kind == Unshard) again.erase(action.stage);
    std::vector<Action> halves = parts(action);
    for (auto part = halves.rbegin(); part != halves.rend(); ++part) {
      if (!part->computes()) continue;
      seen[{part->stage, part->kind, part->micro_batch}] = {.coming = coming, .stays = again.contains(part->stage)};
      if (!uses_parameters(*part)) continue;
      coming = *part;
      again.insert(part->stage);
    }
  }
  // A stage that is never unsharded comes and goes with each action.
  std::set<int> gathers;
  for (const Action& action : actions) {
    if (action.kind == Unshard) gathers.insert(action.stage);
  }
  for (auto& [key, outlook] : seen) outlook.stays = outlook.stays && gathers.contains(std::get<0>(key));
  return seen;
}

}  // namespace tessera::schedules
