#pragma once

#include <chrono>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include <c10/util/intrusive_ptr.h>

#include "tessera/launch/round.h"

namespace c10d {
class Store;
}

/// Where agents read and write what they share. Not part of the public surface.
namespace tessera::launch {

/// What one agent saw in one exchange.
struct View {
  Round round{};
  std::map<std::string, Peer> peers{};  ///< all other members and those that wait
  double unchanged_s = 0;               ///< since the members last changed
};

/// A change of what a view showed.
struct Proposal {
  Round seen{}, wanted{};
};

/// A job's keys in a store. An exchange is 3 requests and one for each other node.
class Board {
 public:
  using Clock = std::chrono::steady_clock;

  /// Asks the hosts of silent nodes, all at once, and returns the ids of those whose agents are gone. May take some time, in which our own beat stands still.
  using WhoIsGone = std::function<std::set<std::string>(const std::vector<Node>& nodes)>;

  /// Keys begin with `prefix`. A job that does not exist there yet begins as `initial`.
  Board(c10::intrusive_ptr<c10d::Store> store, std::string prefix, std::string id, const Round& initial, WhoIsGone who_is_gone = {});

  /// Writes our record, makes the change if nobody was faster, and reads the rest. Silence counts between exchanges, so that an agent that was stopped, or cut
  /// off, blames nobody else for it. Throws what the store throws.
  View exchange(const NodeReport& mine, const std::optional<Proposal>& proposal, Clock::time_point now);

 private:
  struct Pulse {
    int64_t beat = -1;
    Clock::time_point changed{};
    bool gone = false;
  };
  std::string key_of(const std::string& id) const { return prefix_ + "node/" + id; }
  std::string read_state(const std::optional<Proposal>& proposal);
  void read_peers(View& view, Clock::time_point now);

  c10::intrusive_ptr<c10d::Store> store_;
  std::string prefix_, id_, initial_;
  WhoIsGone who_is_gone_;
  std::vector<Node> members_{};
  Clock::time_point members_changed_{};
  std::optional<Clock::time_point> last_{};
  std::map<std::string, Pulse> pulses_{};
};

}  // namespace tessera::launch
