#include "tessera/comm/meeting/rendezvous.h"

#include <algorithm>
#include <sstream>
#include <string>
#include <thread>
#include <utility>

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "tessera/comm/backends/mpi/library.h"
#include "tessera/comm/failure.h"
#include "tessera/comm/meeting/endpoint.h"
#include "tessera/comm/meeting/network.h"
#include "tessera/comm/meeting/stores.h"
#include "tessera/core/error.h"
#include "tessera/core/log.h"

// Torch's store client tells a user who waits nothing, and in the end that time is over. So the address is tried by plain connections until somebody listens,
// and only then does the client join. Who is last to announce itself sets one key, at which all look; the keys of single ranks are read only to say who is
// missing. A launcher's store outlives a world and the process that made it, and rank 0's own one is still there for a moment when another rank has gone on to
// the next world already. So each world has keys of its own, by a number that the store gives out: what a process remembers ends with it, while its launcher
// may start another one in its place.

namespace tessera::comm {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;
using Store = c10::intrusive_ptr<c10d::Store>;

constexpr milliseconds patience{10'000};  ///< after which a rank says whom it waits for; of a short timeout, a quarter

const std::string kRendezvous = "rendezvous", kCount = "count", kComplete = "complete";

/// Set by a rank that has seen all come, or waits for none to.
std::string gone_on(int rank) { return detail::concat("gone_on/", rank); }

milliseconds until(Clock::time_point deadline) { return std::max(milliseconds(1), std::chrono::duration_cast<milliseconds>(deadline - Clock::now())); }

/// Where the store is served: under one of `hosts`, which are not known to all reach rank 0.
struct Master {
  std::vector<std::string> hosts;
  int port = 0;

  std::string describe() const {
    std::string names;
    for (const auto& host : hosts) names += (names.empty() ? "" : " or ") + host;
    return comm::describe({.host = names, .port = port});
  }

  /// For the others: "port host host ..."
  std::string told() const {
    auto text = std::to_string(port);
    for (const auto& host : hosts) text += " " + host;
    return text;
  }

  static Master from(const std::string& told) {
    std::istringstream in(told);
    Master master;
    in >> master.port;
    for (std::string host; in >> host;) master.hosts.push_back(host);
    return master;
  }
};

class Rendezvous {
 public:
  Rendezvous(const Environment& environment, milliseconds timeout, const std::string& backend)
      : environment_(environment), backend_(backend), deadline_(start_ + timeout), patient_until_(start_ + std::min(patience, timeout / 4)) {
    if (!environment.master_addr.empty()) master_.hosts = {environment.master_addr};
    master_.port = environment.master_port;
  }

  Meeting meet() {
    try {
      Store store = connect();
      announce(store);
      return {std::move(store), master_.hosts.front(), local_address_};
    } catch (const ConfigError&) {
      throw;
    } catch (...) {
      throw CommError(detail::concat("rank ", environment_.rank, " of ", environment_.size, ": no rendezvous at ", master_.describe(), " (served by ",
                                     environment_.agent_store ? "the launcher" : "rank 0", "): ", message_of(std::current_exception()), "; waited ",
                                     seconds_since(start_)));
    }
  }

 private:
  bool serves() const { return environment_.rank == 0 && !environment_.agent_store; }

  Store connect() {
    if (master_.hosts.empty() || master_.port == 0) return learn_and_connect();
    outlives_worlds_ = environment_.agent_store;
    return serves() ? next_world(serve(), environment_, Arrival::Announced).store : reach();
  }

  // Rank 0's port is known once it serves; what it tells is "port host host ...". Later worlds of the process meet at the same place, under keys of their own.
  Store learn_and_connect() {
    const auto missing = mpi_library_missing();
    require(missing.empty(), "MASTER_ADDR and MASTER_PORT are not set under mpirun, and cannot be learned through MPI: ", missing,
            "; or set both to an address of rank 0's host and a free port on it");
    auto& place = mpi_library().meeting_place;
    if (place.told.empty()) {
      if (environment_.rank == 0) place.served = serve_anywhere();
      place.told = mpi_library().share(environment_, master_.told(), backend_ == "mpi");
    }
    master_ = Master::from(place.told);
    outlives_worlds_ = true;
    if (environment_.rank != 0) return reach();
    local_address_ = own_address();
    return next_world(place.served, environment_, Arrival::Announced).store;
  }

  Store serve_anywhere() {
    if (master_.hosts.empty()) master_.hosts = hosts_of_rank_0();
    return serve();
  }

  std::vector<std::string> hosts_of_rank_0() const {
    if (environment_.local_size == environment_.size) return {"127.0.0.1"};
    auto hosts = local_addresses();
    if (hosts.empty()) throw CommError("this host has no address that others could reach");
    return hosts;
  }

  Store serve() {
    // Of several addresses, no one knows which of them the others will reach.
    auto store = serve_store({.host = master_.hosts.size() == 1 ? master_.hosts.front() : "0.0.0.0", .port = master_.port});
    if (!store) throw CommError("Address already in use");
    master_.port = store->getPort();
    local_address_ = own_address();
    return store;
  }

  // Of the host that serves, on the way to itself.
  std::string own_address() const { return probe({.host = master_.hosts.front(), .port = master_.port}, until(deadline_)).local_address; }

  // Once, long before the deadline: somebody who started one rank of several by mistake would look at nothing for minutes.
  void say_that_we_wait(const std::string& for_whom) {
    if (std::exchange(said_, true)) return;
    const std::string who = environment_.told_by.empty() ? "" : detail::concat(" It is one of ", environment_.size, " by ", environment_.told_by, ".");
    log().warn("rank {} of {} has waited {} for {}; it goes on until comm.timeout_s.{} Were all ranks started, as so many and with the same address?",
               environment_.rank, environment_.size, seconds_since(start_), for_whom, who);
  }
  bool waits_long() const { return Clock::now() >= patient_until_; }

  // Torch's client would print a stack trace for each failed try and end with no more than "timed out".
  Store reach() {
    for (auto pause = milliseconds(10);; pause = std::min(2 * pause, milliseconds(500))) {
      std::string problem;
      for (const auto& host : master_.hosts) {
        auto found = probe({.host = host, .port = master_.port}, std::min(until(deadline_), milliseconds(5000)));
        if (found.problem.empty()) {
          if (Store store = join(host, found.problem)) {
            local_address_ = std::move(found.local_address);
            master_.hosts = {host};
            return store;
          }
        }
        problem = std::move(found.problem);
      }
      if (Clock::now() + pause > deadline_) throw CommError(problem);
      if (waits_long()) say_that_we_wait(detail::concat(environment_.agent_store ? "the launcher" : "rank 0", " at ", master_.describe(), " (", problem, ")"));
      std::this_thread::sleep_for(pause);
    }
  }

  // Rank 0 serves a store for one world alone. In one where this rank has begun a world before, rank 0 is about to end that world; it may close at any moment.
  Store join(const std::string& host, std::string& problem) const {
    try {
      auto world = next_world(join_store({.host = host, .port = master_.port}, until(deadline_)), environment_, Arrival::Announced);
      if (world.number == 0 || outlives_worlds_) return std::move(world.store);
      problem = "the store there is that of an earlier world of these ranks";
    } catch (...) {
      if (outlives_worlds_) throw;
      problem = message_of(std::current_exception());
    }
    return {};
  }

  void announce(const Store& store) {
    const auto here = c10::make_intrusive<c10d::PrefixStore>(kRendezvous, store);
    const std::string mine = std::to_string(environment_.rank);
    const bool again = here->check({mine});  // a process before this one came, and ended while others were still to come
    if (here->add(kCount, again ? 0 : 1) >= environment_.size) here->set(kComplete, "yes");
    here->set(mine, "here");
    for (auto pause = milliseconds(1); !here->check({kComplete}); pause = std::min(2 * pause, milliseconds(50))) {
      if (Clock::now() >= deadline_) throw CommError(who_is_missing(*here));
      if (waits_long() && !said_) {
        // All ranks see the same, and the first of those who have come says it for them.
        const auto missing = missing_ranks(*here);
        int first = 0;
        while (std::ranges::find(missing, first) != missing.end()) ++first;
        if (first == environment_.rank && !missing.empty()) say_that_we_wait("rank" + std::string(missing.size() == 1 ? " " : "s ") + format_ranks(missing));
        said_ = true;
      }
      std::this_thread::sleep_for(pause);
    }
    here->set(gone_on(environment_.rank), "yes");
  }

  std::vector<int> missing_ranks(c10d::Store& here) const {
    std::vector<int> missing;
    for (int rank = 0; rank < environment_.size; ++rank) {
      if (!here.check({std::to_string(rank)})) missing.push_back(rank);
    }
    return missing;
  }

  std::string who_is_missing(c10d::Store& here) const {
    const auto missing = missing_ranks(here);
    return detail::concat(environment_.size - missing.size(), " of ", environment_.size, " ranks have come; missing: ", format_ranks(missing));
  }

  const Environment& environment_;
  const std::string& backend_;
  const Clock::time_point start_ = Clock::now();
  const Clock::time_point deadline_;
  const Clock::time_point patient_until_;
  bool said_ = false;
  bool outlives_worlds_ = false;  ///< the store; otherwise rank 0 serves one for each world
  Master master_;
  std::string local_address_;
};

}  // namespace

NextWorld next_world(Store store, const Environment& environment, Arrival arrival) {
  const auto alike = detail::concat("tessera/attempt/", environment.restart_count, "/of/", environment.size);
  const auto world = [&](int64_t number) { return detail::concat(alike, "/world/", number); };
  const auto begun_by_this = detail::concat(alike, "/begun_by/", environment.rank);
  const auto gone_on_from = [&](int64_t number) { return detail::concat(world(number), "/", kRendezvous, "/", gone_on(environment.rank)); };
  int64_t number = store->add(begun_by_this, 0) - 1;
  const bool gathers = arrival == Arrival::Announced && number >= 0 && !store->check({gone_on_from(number)});
  if (!gathers) number = store->add(begun_by_this, 1) - 1;
  if (arrival == Arrival::Unannounced) store->set(gone_on_from(number), "yes");  // or the next one would be taken for a second start of this one
  return {.store = c10::make_intrusive<c10d::PrefixStore>(world(number), std::move(store)), .number = number};
}

Meeting rendezvous(const Environment& environment, milliseconds timeout, const std::string& backend) {
  return Rendezvous(environment, timeout, backend).meet();
}

}  // namespace tessera::comm
