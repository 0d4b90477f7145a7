#include "tessera/pipeline/schedules/schedule.h"

#include <algorithm>
#include <array>
#include <string_view>
#include <utility>

#include <fmt/format.h>

namespace tessera::schedules {
namespace {

using enum Kind;

constexpr std::array<std::string_view, 13> kKindNames{"F",      "B",       "I",       "W",           "SEND_F", "RECV_F",     "SEND_B",
                                                      "RECV_B", "UNSHARD", "RESHARD", "REDUCE_GRAD", "UPDATE", "OVERLAP_F_B"};

constexpr std::array<std::string_view, 13> kKindWords{"forward",
                                                      "backward",
                                                      "backward of inputs",
                                                      "gradients of weights",
                                                      "send of an output",
                                                      "receive of an input",
                                                      "send of a gradient",
                                                      "receive of a gradient",
                                                      "gathering of parameters",
                                                      "release of parameters",
                                                      "reduction of gradients",
                                                      "update",
                                                      "forward and backward"};

bool any_action(const Schedule& schedule, auto&& predicate) {
  return std::ranges::any_of(schedule.actions, [&](const RankActions& actions) { return std::ranges::any_of(actions, predicate); });
}

}  // namespace

std::string_view words_of(Kind kind) { return kKindWords[static_cast<size_t>(kind)]; }

std::vector<Action> parts(const Action& action) {
  if (action.kind != Overlap) return {action};
  return {{.kind = Forward, .stage = action.stage, .micro_batch = action.micro_batch, .version = action.version},
          {.kind = Backward, .stage = action.backward_stage, .micro_batch = action.backward_micro_batch, .version = action.version}};
}

std::string to_string(const Action& action) {
  const auto name = kKindNames[static_cast<size_t>(action.kind)];
  if (action.kind == Overlap) return fmt::format("({}F{};{}B{}){}", action.stage, action.micro_batch, action.backward_stage, action.backward_micro_batch, name);
  auto text = fmt::format("{}{}", action.stage, name);
  if (action.has_micro_batch()) text += std::to_string(action.micro_batch);
  if (action.version != 0) text += fmt::format("@{}", action.version);
  return text;
}

std::vector<int> Schedule::stages_of(int rank) const {
  std::vector<int> held;
  for (int stage = 0; stage < stages(); ++stage) {
    if (rank_of[stage] == rank) held.push_back(stage);
  }
  return held;
}

int Schedule::chunks(int rank) const { return static_cast<int>(std::ranges::count(rank_of, rank)); }

bool Schedule::is_asynchronous() const {
  return any_action(*this, [](const Action& action) { return action.kind == Update; });
}

bool Schedule::splits_backward() const {
  return any_action(*this, [](const Action& action) { return action.kind == BackwardInput; });
}

bool Schedule::is_lowered() const {
  return any_action(*this, [](const Action& action) { return action.sends() || action.receives(); });
}

std::vector<int> loop_placement(int ranks, int chunks) {
  std::vector<int> rank_of(static_cast<size_t>(ranks) * chunks);
  for (size_t stage = 0; stage < rank_of.size(); ++stage) rank_of[stage] = static_cast<int>(stage) % ranks;
  return rank_of;
}

std::vector<int> v_placement(int ranks, int chunks) {
  auto rank_of = loop_placement(ranks, chunks);
  for (size_t stage = 0; stage < rank_of.size(); ++stage) {
    if (stage / ranks % 2 == 1) rank_of[stage] = ranks - 1 - rank_of[stage];
  }
  return rank_of;
}

Schedule with_weight_gradients(Schedule schedule, WeightGradients when) {
  if (when == WeightGradients::InBackward) return schedule;
  for (auto& actions : schedule.actions) {
    RankActions cut, later;
    for (Action action : actions) {
      if (action.kind != Backward) {
        cut.push_back(action);
        continue;
      }
      action.kind = BackwardInput;
      cut.push_back(action);
      action.kind = BackwardWeight;
      (when == WeightGradients::BehindBackward ? cut : later).push_back(action);
    }
    cut.insert(cut.end(), later.begin(), later.end());
    actions = std::move(cut);
  }
  return schedule;
}

Schedule with_backwards_alike(Schedule schedule) {
  std::vector<bool> cuts(static_cast<size_t>(schedule.stages()));
  for (const auto& actions : schedule.actions) {
    for (const Action& action : actions) {
      if (action.kind == BackwardInput) cuts[static_cast<size_t>(action.stage)] = true;
    }
  }
  for (auto& actions : schedule.actions) {
    RankActions alike;
    for (const Action& action : actions) {
      const bool whole = action.kind == Backward || action.kind == Overlap;
      if (!whole || !cuts[static_cast<size_t>(parts(action).back().stage)]) {
        alike.push_back(action);
        continue;
      }
      for (Action part : parts(action)) {
        if (part.kind == Backward) part.kind = BackwardInput;
        alike.push_back(part);
      }
      alike.push_back(alike.back());
      alike.back().kind = BackwardWeight;
    }
    actions = std::move(alike);
  }
  return schedule;
}

int most_alive(const Schedule& schedule, int rank) {
  int alive = 0, most = 0;
  for (const Action& action : schedule.actions[rank]) {
    if (action.kind == Forward || action.kind == Overlap) most = std::max(most, ++alive);
    if (action.kind == Backward || action.kind == BackwardWeight || action.kind == Overlap) --alive;
  }
  return most;
}

std::string to_string(const Schedule& schedule) {
  std::string text;
  for (int rank = 0; rank < schedule.ranks(); ++rank) {
    text += fmt::format("rank {}:", rank);
    for (const Action& action : schedule.actions[rank]) text += " " + to_string(action);
    text += "\n";
  }
  return text;
}

}  // namespace tessera::schedules
