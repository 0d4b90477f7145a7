#include "tessera/pipeline/schedules/progress.h"

#include <algorithm>

#include <fmt/format.h>

// Whether a schedule comes to its end, without running it: every rank goes on as far as it can, in turns, until nobody moves. Order between ranks does not
// matter to the outcome (what is there stays there), so one such sweep stands for every interleaving. Messages go by one of two rules: they are begun and left
// to the engine, which completes the nth that one rank begins with another with the nth that the other begins with it, or both ends have to be there at once,
// as with large ones. Whoever is left then waits for somebody who waits, and following those waits from any of them comes round: the circle is what a user is
// shown.

namespace tessera::schedules::detail {
namespace {

Event event_of(const Action& message) { return {message.kind, message.stage, message.micro_batch}; }

/// A receive under the name of its send.
Event as_send(const Event& event) {
  if (event.kind == Kind::ReceiveForward) return {Kind::SendForward, event.stage - 1, event.micro_batch};
  if (event.kind == Kind::ReceiveBackward) return {Kind::SendBackward, event.stage + 1, event.micro_batch};
  return event;
}

Event as_receive(const Event& send) { return event_of(receive_of({.kind = send.kind, .stage = send.stage, .micro_batch = send.micro_batch})); }

std::string text_of(const Event& event) { return to_string(Action{.kind = event.kind, .stage = event.stage, .micro_batch = event.micro_batch}); }

}  // namespace

Progress::Progress(const Schedule& schedule, Messages messages)
    : schedule_(schedule),
      messages_(messages),
      through_messages_(schedule.is_lowered()),
      index_(schedule),
      there_(index_.size()),
      position_(schedule.ranks()) {}

std::optional<Problem> Progress::run() {
  for (bool moved = true; moved;) {
    moved = false;
    for (int rank = 0; rank < schedule_.ranks(); ++rank) {
      while (!at_end(rank) && advance(rank)) moved = true;
    }
  }
  if (auto found = out_of_order()) return found;
  for (int rank = 0; rank < schedule_.ranks(); ++rank) {
    if (!at_end(rank)) return circle(rank);
  }
  return std::nullopt;
}

/// What an action needs and is not there; a receive that is only begun needs nothing.
std::optional<Event> Progress::missing(const Action& action) const {
  if (action.receives()) return std::nullopt;
  for (const auto& event : needs(schedule_, action, through_messages_)) {
    if (!is_there(event)) return event;
  }
  return std::nullopt;
}

bool Progress::advance(int rank) {
  const Action& action = current(rank);
  if (missing(action)) return false;
  if (action.sends() || action.receives()) {
    if (messages_ == Messages::Rendezvous) return meet(rank);
    post(rank, action);
  }
  finish(rank);
  return true;
}

void Progress::finish(int rank) {
  const Action& action = current(rank);
  // What a receive brings is there once its message is complete.
  if (!action.receives()) {
    for (const auto& event : brings(action)) there_[index_(event)] = true;
  }
  ++position_[rank];
}

/// Both ends of a message go on together, once both stand there.
bool Progress::meet(int rank) {
  const int other = peer(schedule_, current(rank));
  if (at_end(other) || missing(current(other))) return false;
  const Event mine = event_of(current(rank)), theirs = event_of(current(other));
  if (!(as_send(mine) == as_send(theirs)) || mine == theirs) return false;
  there_[index_(as_receive(as_send(mine)))] = true;
  finish(rank);
  finish(other);
  return true;
}

void Progress::post(int rank, const Action& message) {
  const int other = peer(schedule_, message);
  Line& line = lines_[std::minmax(rank, other)];
  line.begun[rank < other ? 0 : 1].push_back(event_of(message));
  for (; line.completed < std::min(line.begun[0].size(), line.begun[1].size()); ++line.completed) {
    const Event send = as_send(line.begun[0][line.completed]);
    if (!(send == as_send(line.begun[1][line.completed]))) return;
    there_[index_(as_receive(send))] = true;
  }
}

/// Two ranks that begin their messages with each other in different orders.
std::optional<Problem> Progress::out_of_order() const {
  for (const auto& [ranks, line] : lines_) {
    if (line.completed == std::min(line.begun[0].size(), line.begun[1].size())) continue;
    return Problem{.rank = ranks.first,
                   .what = fmt::format("message {} between ranks {} and {} differs: the one begins {}, the other {}", line.completed, ranks.first, ranks.second,
                                       text_of(line.begun[0][line.completed]), text_of(line.begun[1][line.completed]))};
  }
  return std::nullopt;
}

/// An event under the name of the action that brings it about: a gradient of inputs may come from a whole backward, or an overlap.
std::string Progress::name_of(const Event& event) const {
  for (const Action& action : schedule_.actions[schedule_.rank_of[event.stage]]) {
    for (const Event& brought : brings(action)) {
      if (brought == event) return to_string(action);
    }
  }
  return text_of(event);
}

/// The rank that has to go on before `event` is there.
int Progress::waits_for(int rank, const Event& event) const {
  if (event.kind != Kind::ReceiveForward && event.kind != Kind::ReceiveBackward) return schedule_.rank_of[event.stage];
  // A message that is not complete: its sender has not come so far; or it has, and an earlier message between the two holds it up, or nobody receives it.
  const Event send = as_send(event);
  return is_there(send) ? rank : schedule_.rank_of[send.stage];
}

Problem Progress::circle(int rank) const {
  // Nobody moves, so everybody waits for somebody who has not ended: whoever follows the waiting comes back to where he was.
  std::vector<int> visited;
  while (std::ranges::find(visited, rank) == visited.end()) {
    visited.push_back(rank);
    const auto event = missing(current(rank));
    rank = event ? waits_for(rank, *event) : peer(schedule_, current(rank));
    if (at_end(rank)) break;
  }
  std::string text;
  const auto begin = std::ranges::find(visited, rank);
  for (auto it = begin == visited.end() ? visited.begin() : begin; it != visited.end(); ++it) {
    const Action& action = current(*it);
    const auto event = missing(action);
    if (!text.empty()) text += "; ";
    if (!event) {
      text += fmt::format("rank {} stands in {} until rank {} comes to its other end", *it, to_string(action), peer(schedule_, action));
    } else if (const int other = waits_for(*it, *event); other == *it) {
      text += fmt::format("rank {} is at {}, which needs {}, and does that later or not at all", *it, to_string(action), name_of(*event));
    } else {
      text += fmt::format("rank {} is at {}, which needs {} of rank {}", *it, to_string(action), name_of(*event), other);
    }
  }
  return {.rank = rank, .position = at_end(rank) ? -1 : static_cast<int>(position_[rank]), .what = "deadlock: " + text};
}

}  // namespace tessera::schedules::detail
