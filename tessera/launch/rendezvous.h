#pragma once

#include <chrono>
#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include <c10/util/intrusive_ptr.h>

#include "tessera/comm/meeting/endpoint.h"
#include "tessera/launch/board.h"
#include "tessera/launch/round.h"

namespace c10d {
class Store;
class TCPStore;
}  // namespace c10d

/// Where agents meet, and where they meet again when that place vanishes. Not part of the public surface.
namespace tessera::launch {

struct RendezvousOptions {
  std::optional<comm::Endpoint> endpoint{};  ///< none: alone, without a network
  std::string run_id = "none";
  Rules rules{};
  int nproc = 1;
  int node_rank = -1;            ///< static rendezvous; the first serves the store
  std::optional<bool> serves{};  ///< whether this agent serves the store, where that is not to be seen from the address
  std::string local_address{};   ///< empty: that of the connection
};

/// The agent whose host has the endpoint's address serves the store there; where several agents are on that host, the first one.
///
/// Each agent also keeps a spare store, whose port is part of its Node. When the store no longer answers, the members of the last round meet at the spare of
/// the first one of them, in the order of their ranks, that is left. It goes on with the job if the old place is proven to be gone (its host refuses the
/// connection), or if more than half of the last round's nodes, and at least MIN, come to it. A host that does not answer at all cannot be told from a cut
/// link, behind which the others may go on; in that case the rest only tries to come back. Whoever comes leaves word of what it has seen of the job.
///
/// Another store at the old place, of a job that begins there, proves that the old one is gone as well. Where too few nodes are left for the job to go on
/// elsewhere, and the other one has its --rdzv-id, they are of that one from then on, and so is a node that only waited and finds no member. Who goes to
/// another job leaves word in its spare store, or those who come there would wait for it.
class Rendezvous {
 public:
  explicit Rendezvous(RendezvousOptions options);

  /// Meets the others, again after an error. Called from a thread that may be left behind, and then from another one. Throws CommError with the cause.
  std::unique_ptr<Board> connect();

  /// This agent; its address is known once it has been connected.
  Node node() const;
  /// "address 10.0.0.1, port 29400": of the present place.
  std::string place() const;
  /// Whether others read from a store of this process.
  bool serves() const;
  /// Remembers the job, in case this agent has to go on with it.
  void note(const Round& round);

 private:
  using Store = c10::intrusive_ptr<c10d::Store>;

  /// What was known when a try to connect began. Several may be under way, all but the last of them left behind: what those find out is dropped.
  struct Known {
    int64_t attempt = 0;
    bool met = false;
    comm::Endpoint place{};
    std::string server{};
    Round job{};
    std::optional<std::chrono::steady_clock::time_point> lost_at{};
    Visits visits{};  ///< to our spare store, since then
    double lasts_s() const { return std::chrono::duration<double>(std::chrono::steady_clock::now() - lost_at.value()).count(); }
  };
  Known begin_attempt();
  /// Changes what is known, unless a later attempt has begun.
  template <class Change>
  void commit(const Known& known, Change&& change);

  Store first_meeting(const Known& known);
  /// Of the job, what those saw who came to our spare store: more than we, or even that it has begun.
  void learn(Known& known) const;
  void note_visits(Known& known);
  /// Nothing where the node is to begin anew.
  Store meet_again(Known known);
  /// Null: who is there is no longer that of the job.
  Store meet_at_old_place(const Known& known, OldPlace& found) const;
  Store take_over(const Known& known, int quorum);
  Spare state_of(c10d::Store& spare, const Known& known) const;
  void bring_up_to_date(c10d::Store& store, const Known& known) const;
  void say_that_we_serve(c10d::Store& store) const;
  /// The --rdzv-id of the agent that serves `store`. Throws CommError where none does.
  static std::string id_there(c10d::Store& store);
  /// Throws CommError, with both ids, where the agent that serves `store` has another --rdzv-id than this one.
  void require_own_job(c10d::Store& store) const;
  std::unique_ptr<Board> board_on(Store store, const Round& initial);
  std::string key(const std::string& name) const { return "tessera/" + options_.run_id + "/" + name; }

  const RendezvousOptions options_;
  mutable std::mutex mutex_;  ///< of what follows; never held while the network is asked
  Node node_;
  Known known_{};
  Store alone_{};
  c10::intrusive_ptr<c10d::TCPStore> served_{}, spare_{};
  bool spare_serves_ = false;
};

}  // namespace tessera::launch
