#include "tessera/launch/board.h"

#include <algorithm>

#include <torch/csrc/distributed/c10d/Store.hpp>

// Hosts' clocks are never compared: a node is silent for as long as its beat has not changed by our own clock. A lost beat may be a slow network as well as a
// dead agent, so after a moment its host is asked, which can tell a process that is gone from one that is slow; where no answer comes, the longer silence has
// to do.

namespace tessera::launch {
namespace {

/// After which a node's host is asked whether its agent lives.
constexpr double suspicious_s = 1.5;

/// For a node to find its way to a store that took over.
constexpr double arrival_s = 8;

double seconds(Board::Clock::duration duration) { return std::chrono::duration<double>(duration).count(); }

}  // namespace

Board::Board(c10::intrusive_ptr<c10d::Store> store, std::string prefix, std::string id, const Round& initial, WhoIsGone who_is_gone)
    : store_(std::move(store)), prefix_(std::move(prefix)), id_(std::move(id)), initial_(write_round(initial)), who_is_gone_(std::move(who_is_gone)) {}

View Board::exchange(const NodeReport& mine, const std::optional<Proposal>& proposal, Clock::time_point now) {
  store_->set(key_of(id_), write_record(mine));
  View view{.round = read_round(read_state(proposal))};
  if (!last_ || view.round.nodes != members_) {
    members_ = view.round.nodes;
    members_changed_ = now;
  }
  view.unchanged_s = seconds(now - members_changed_);
  read_peers(view, now);
  last_ = now;
  return view;
}

std::string Board::read_state(const std::optional<Proposal>& proposal) {
  const std::string key = prefix_ + "round";
  return proposal ? store_->compareSet(key, write_round(proposal->seen), write_round(proposal->wanted)) : store_->compareSet(key, "", initial_);
}

void Board::read_peers(View& view, Clock::time_point now) {
  std::vector<const Node*> others;
  std::vector<std::string> keys;
  for (const auto* list : {&view.round.nodes, &view.round.waiting}) {
    for (const Node& node : *list) {
      if (node.id == id_) continue;
      others.push_back(&node);
      keys.push_back(key_of(node.id));
    }
  }
  const bool all_there = keys.empty() || store_->check(keys);  // in a store that took over, some may not have written yet
  std::vector<Node> suspects;
  for (size_t i = 0; i < others.size(); ++i) {
    Peer& peer = view.peers[others[i]->id];
    Pulse& pulse = pulses_[others[i]->id];
    const bool has_come = all_there || store_->check({keys[i]});
    peer.there = has_come;
    if (has_come) peer.record = read_record(store_->get_to_str(keys[i]));
    if (pulse.beat != peer.record.beat || !last_) pulse = {peer.record.beat, now};
    const double silent_s = seconds(now - pulse.changed);
    peer.silent_s = has_come ? silent_s : std::max(0.0, silent_s - arrival_s);
    if (!pulse.gone && silent_s > suspicious_s) suspects.push_back(*others[i]);
  }
  if (who_is_gone_ && !suspects.empty()) {
    for (const std::string& id : who_is_gone_(suspects)) pulses_[id].gone = true;
  }
  for (auto& [id, peer] : view.peers) peer.gone = pulses_[id].gone;
}

}  // namespace tessera::launch
