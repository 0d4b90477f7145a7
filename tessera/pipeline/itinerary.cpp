#include "tessera/pipeline/itinerary.h"

#include <algorithm>
#include <map>
#include <utility>

#include "tessera/core/error.h"

namespace tessera::pipeline {
namespace {

using schedules::Action;
using schedules::Kind;
using schedules::Schedule;

bool is_backward(const Action& action) { return action.kind == Kind::Backward || action.kind == Kind::BackwardInput; }

/// One rank's actions that compute or update, the halves of an overlap one after the other.
std::vector<Action> computations(const Schedule& schedule, int rank) {
  std::vector<Action> found;
  for (const Action& action : schedule.actions[static_cast<size_t>(rank)]) {
    if (!action.occupies()) continue;
    for (const Action& part : schedules::parts(action)) found.push_back(part);
  }
  return found;
}

/// Messages between `rank` and others that an action takes, or makes.
std::vector<Message> messages_of(const Schedule& schedule, const Crossings& crossings, int rank, const Action& action, bool makes) {
  std::vector<Message> messages;
  const bool gradient = is_backward(action);
  if (!gradient && action.kind != Kind::Forward) return messages;
  for (size_t c = 0; c < crossings.size(); ++c) {
    const Crossing& crossing = crossings[c];
    if (gradient && !crossing.takes_gradient) continue;
    const bool goes_out = gradient != makes;  // values leave behind a forward, gradients come to a backward, at the end where the value is made
    const int here = goes_out ? crossing.from : crossing.to, there = goes_out ? crossing.to : crossing.from;
    const int peer = schedule.rank_of[static_cast<size_t>(there)];
    if (here == action.stage && peer != rank) messages.push_back({static_cast<int>(c), action.micro_batch, gradient, peer});
  }
  return messages;
}

/// What `peer` sends to `rank`, in its order, as `rank` sees it.
std::vector<Message> incoming(const Schedule& schedule, const Crossings& crossings, int peer, int rank) {
  std::vector<Message> order;
  for (const Action& action : computations(schedule, peer)) {
    for (Message message : messages_of(schedule, crossings, peer, action, /*makes=*/true)) {
      if (message.peer != rank) continue;
      message.peer = peer;
      order.push_back(message);
    }
  }
  return order;
}

/// The receives of one rank, in the order in which each peer sends.
class Receives {
 public:
  Receives(const Schedule& schedule, const Crossings& crossings, int rank) : schedule_(schedule), crossings_(crossings), rank_(rank) {}

  /// Messages up to the last of `needed` that have not been posted. A gradient has a shape once its forward has run: `ran` says so; what comes behind waits
  /// too.
  template <class Ran>
  void post(const std::vector<Message>& needed, const Ran& ran, std::vector<Message>& posts) {
    for (const Message& message : needed) {
      auto& [order, posted] = from(message.peer);
      const auto place = std::ranges::find(order, message);
      invariant(place != order.end(), "rank ", message.peer, " does not send what rank ", rank_, " needs of micro-batch ", message.micro_batch);
      const auto end = static_cast<size_t>(place - order.begin()) + 1;
      while (posted < end && (!order[posted].gradient || ran(order[posted]))) posts.push_back(order[posted++]);
    }
  }

 private:
  struct Peer {
    std::vector<Message> order;
    size_t posted = 0;
  };
  Peer& from(int peer) {
    const auto found = peers_.find(peer);
    return found != peers_.end() ? found->second : peers_.emplace(peer, Peer{incoming(schedule_, crossings_, peer, rank_)}).first->second;
  }

  const Schedule& schedule_;
  const Crossings& crossings_;
  int rank_;
  std::map<int, Peer> peers_;
};

}  // namespace

std::vector<Leg> itinerary(const Schedule& schedule, const Crossings& crossings, int rank) {
  std::vector<Leg> legs;
  for (const Action& action : computations(schedule, rank)) {
    legs.push_back({.action = action,
                    .posts = {},
                    .needs = messages_of(schedule, crossings, rank, action, /*makes=*/false),
                    .sends = messages_of(schedule, crossings, rank, action, /*makes=*/true)});
  }
  std::map<std::pair<int, int>, size_t> forwards;  // of a stage's micro-batch: which leg
  for (size_t i = 0; i < legs.size(); ++i) {
    if (legs[i].action.kind == Kind::Forward) forwards[{legs[i].action.stage, legs[i].action.micro_batch}] = i;
  }
  Receives receives(schedule, crossings, rank);
  for (size_t i = 0; i < legs.size(); ++i) {
    const auto ran = [&](const Message& message) {
      const auto found = forwards.find({crossings[static_cast<size_t>(message.crossing)].from, message.micro_batch});
      return found != forwards.end() && found->second < i;
    };
    receives.post(legs[i].needs, ran, legs[i].posts);
    const auto next = std::find_if(legs.begin() + static_cast<std::ptrdiff_t>(i) + 1, legs.end(), [](const Leg& leg) { return leg.action.computes(); });
    if (next != legs.end()) receives.post(next->needs, ran, legs[i].posts);
  }
  return legs;
}

}  // namespace tessera::pipeline
