#include "tessera/launch/rendezvous.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <map>
#include <random>
#include <set>
#include <thread>
#include <utility>
#include <vector>

#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>
#include <unistd.h>

#include "tessera/comm/meeting/stores.h"
#include "tessera/core/drawn_name.h"
#include "tessera/core/error.h"
#include "tessera/core/host_name.h"

// Asking the network may take for ever, so no lock is held meanwhile, and whoever waits may leave a try behind and begin another. A try works on what was known
// when it began and commits what it found at the end, unless a later one has begun: what comes late is dropped. Only a refused connection proves that a process
// is gone; a host that is silent may be alive behind a cut link.

namespace tessera::launch {
namespace {

using namespace std::chrono_literals;

constexpr auto patience = 2s;

/// Of whoever serves, its --rdzv-id: the one key without an id before it, so that an agent of another job learns whose place it is.
constexpr const char* job_key = "tessera/job";

/// Process ids repeat across containers of one host name.
std::string unique_id() { return detail::concat(host_name("node"), '_', getpid(), '_', std::random_device{}() % 10000); }

/// What comes of a try at each one's spare store.
std::vector<comm::Probe> probe_spares(const std::vector<Node>& nodes, std::chrono::milliseconds patience) {
  std::vector<comm::Endpoint> spares;
  for (const Node& node : nodes) spares.push_back({node.address, node.spare_port});
  return comm::probe_all(spares, patience);
}

std::set<std::string> who_is_gone(std::vector<Node> nodes, std::chrono::milliseconds patience) {
  std::erase_if(nodes, [](const Node& node) { return node.spare_port == 0; });
  const auto probes = probe_spares(nodes, patience);
  std::set<std::string> gone;
  for (size_t i = 0; i < nodes.size(); ++i) {
    if (probes[i].refused) gone.insert(nodes[i].id);
  }
  return gone;
}

}  // namespace

Rendezvous::Rendezvous(RendezvousOptions options) : options_(std::move(options)) {
  known_.place = options_.endpoint.value_or(comm::Endpoint{"localhost", 0});
  node_ = {.id = unique_id(), .address = options_.local_address, .nproc = options_.nproc, .order = options_.node_rank};
  if (!options_.endpoint) {
    node_.address = "127.0.0.1";
    alone_ = c10::make_intrusive<c10d::HashStore>();
  } else if (options_.rules.max_nodes > 1) {
    spare_ = comm::serve_store({comm::is_loopback(known_.place.host) ? known_.place.host : "0.0.0.0", 0});
    node_.spare_port = spare_->getPort();
  }
}

Node Rendezvous::node() const {
  const std::lock_guard lock(mutex_);
  return node_;
}

std::string Rendezvous::place() const {
  const std::lock_guard lock(mutex_);
  return comm::describe(known_.place);
}

bool Rendezvous::serves() const {
  const std::lock_guard lock(mutex_);
  return served_ != nullptr || spare_serves_;
}

void Rendezvous::note(const Round& round) {
  const std::lock_guard lock(mutex_);
  known_.job = round;
}

Rendezvous::Known Rendezvous::begin_attempt() {
  const std::lock_guard lock(mutex_);
  ++known_.attempt;
  if (!known_.lost_at) {
    known_.lost_at = std::chrono::steady_clock::now();
    known_.visits = {};
  }
  return known_;
}

template <class Change>
void Rendezvous::commit(const Known& known, Change&& change) {
  const std::lock_guard lock(mutex_);
  if (known.attempt != known_.attempt) throw CommError("another attempt to connect was faster");
  change();
}

std::unique_ptr<Board> Rendezvous::connect() {
  // Of the agents that begin a job the first one's counts, its name included: the store takes no second.
  Round initial{.nnodes = detail::concat(options_.rules.min_nodes, ':', options_.rules.max_nodes), .job = drawn_name()};
  if (alone_) return board_on(alone_, initial);
  Known known = begin_attempt();
  learn(known);
  const bool again = known.met && (known.job.phase == Phase::Running || known.job.phase == Phase::Stopping);  // otherwise nothing is lost by beginning anew
  Store store = again ? meet_again(known) : Store{};
  const bool anew = !store;
  if (anew) store = first_meeting(known);
  require_own_job(*store);
  const std::string server = store->get_to_str(key("server"));
  const bool of_another_job = anew && known.met && server != known.server;
  commit(known, [&] {
    known_.met = true;
    known_.server = server;
    known_.lost_at.reset();
    if (of_another_job) known_.job = {};
  });
  if (of_another_job && spare_) spare_->clone()->set(key("followed/" + known.job.job), "");
  return board_on(std::move(store), initial);
}

std::unique_ptr<Board> Rendezvous::board_on(Store store, const Round& initial) {
  // Well below what makes others think that we are silent.
  const auto patience = std::min<std::chrono::milliseconds>(500ms, std::chrono::milliseconds(std::lround(options_.rules.dead_after_s * 1000 / 4)));
  return std::make_unique<Board>(std::move(store), key(""), node_.id, initial,
                                 [patience](const std::vector<Node>& nodes) { return who_is_gone(nodes, patience); });
}

void Rendezvous::say_that_we_serve(c10d::Store& store) const {
  store.set(key("server"), node_.id);
  store.set(job_key, options_.run_id);  // last: where it is, the others are
}

std::string Rendezvous::id_there(c10d::Store& store) {
  try {
    return store.get_to_str(job_key);  // waits for it: whoever serves has just begun to
  } catch (const c10::DistStoreError&) {
    throw CommError("the store there is not served by an agent of this version of `tessera run`; give this job another --rdzv-endpoint");
  }
}

void Rendezvous::require_own_job(c10d::Store& store) const {
  const std::string there = id_there(store);
  if (there == options_.run_id) return;
  throw CommError(detail::concat("the job there has --rdzv-id ", there, ", this agent ", options_.run_id, "; give all agents of a job the same"));
}

Rendezvous::Store Rendezvous::first_meeting(const Known& known) {
  const comm::Endpoint& endpoint = *options_.endpoint;
  std::optional<bool> must_serve = options_.serves;
  if (!must_serve && options_.node_rank >= 0) must_serve = options_.node_rank == 0;
  if (must_serve.value_or(comm::is_local(endpoint.host))) {
    if (c10::intrusive_ptr<c10d::TCPStore> store = comm::serve_store(endpoint)) {
      say_that_we_serve(*store);
      commit(known, [&] {
        served_ = store;
        known_.place.port = store->getPort();
        if (node_.address.empty()) node_.address = endpoint.host;
      });
      return store->clone();
    }
    if (must_serve) throw CommError("Address already in use");
  }
  const comm::Probe probe = comm::probe(endpoint, patience);
  if (!probe.problem.empty()) throw CommError(probe.problem);
  Store store = comm::join_store(endpoint, patience);
  commit(known, [&] {
    known_.place = endpoint;
    if (node_.address.empty()) node_.address = probe.local_address;
  });
  return store;
}

Rendezvous::Store Rendezvous::meet_at_old_place(const Known& known, OldPlace& found) const {
  const comm::Probe probe = comm::probe(known.place, patience);
  found = probe.refused ? OldPlace::Nobody : OldPlace::Silent;
  if (!probe.problem.empty()) return {};
  try {
    Store store = comm::join_store(known.place, patience);
    if (store->check({key("server")}) && store->get_to_str(key("server")) == known.server) return store;
    found = OldPlace::Stranger;
    if (id_there(*store) == options_.run_id) found = OldPlace::NewJob;
  } catch (const std::exception&) {  // its process is stopped, or another one has the port
  }
  return {};
}

Spare Rendezvous::state_of(c10d::Store& spare, const Known& known) const {
  if (spare.check({key("round")})) return Spare::Serves;
  return spare.check({key("followed/" + known.job.job)}) ? Spare::Followed : Spare::Undecided;
}

void Rendezvous::learn(Known& known) const {
  if (!known.met || !spare_) return;
  const Store own = spare_->clone();
  const std::string name = key("seen/" + known.job.job);
  if (!own->check({name})) return;
  if (Round seen = read_round(own->get_to_str(name)); seen.number > known.job.number) known.job = std::move(seen);
}

void Rendezvous::note_visits(Known& known) {
  if (!spare_) return;
  const Store own = spare_->clone();
  std::set<std::string> came;
  for (const Node& node : known.job.nodes) {
    if (own->deleteKey(key("came/" + node.id))) came.insert(node.id);
  }
  known.visits.note(came, known.lasts_s());
  commit(known, [&] { known_.visits = known.visits; });
}

Rendezvous::Store Rendezvous::meet_again(Known known) {
  note_visits(known);
  Loss loss{.seen = known.job, .server = known.server, .self = node_.id};
  if (Store store = meet_at_old_place(known, loss.old_place)) return store;

  std::map<std::string, comm::Endpoint> places;
  std::map<std::string, Store> stores;
  const auto look_at = [&](std::vector<Node> nodes, bool until_one_answers) {
    std::erase_if(nodes, [&](const Node& node) { return node.id == known.server || node.id == node_.id; });
    // All at once: whoever walks for longer from one dead host to the next comes too late.
    const auto probes = probe_spares(nodes, patience);
    for (size_t i = 0; i < nodes.size(); ++i) {
      const Node& node = nodes[i];
      loss.spares[node.id] = probes[i].refused ? Spare::Refused : Spare::Silent;
      if (!probes[i].problem.empty()) continue;
      try {
        const Store store = comm::join_store({node.address, node.spare_port}, patience);
        store->set(key("seen/" + known.job.job), write_round(known.job));
        if (until_one_answers) store->set(key("came/" + node_.id), "");
        loss.spares[node.id] = state_of(*store, known);
        places[node.id] = {node.address, node.spare_port};
        stores[node.id] = store;
        if (until_one_answers) return;
      } catch (const std::exception&) {  // its process is stopped, or ends
      }
    }
  };
  const auto& nodes = known.job.nodes;
  const auto self = known.server == node_.id ? nodes.end() : std::ranges::find(nodes, node_.id, &Node::id);
  look_at({nodes.begin(), self}, true);
  const bool leads = stores.empty() && self != nodes.end();
  if (leads) {
    std::vector<Node> rest(self, nodes.end());
    rest.insert(rest.end(), known.job.waiting.begin(), known.job.waiting.end());
    look_at(rest, false);
  }
  note_visits(known);
  loss.lasts_s = known.lasts_s();
  for (const Node& node : nodes) loss.came += known.visits.comes(node.id, loss.lasts_s, options_.rules);

  const WayBack way = way_back(loss, options_.rules);
  switch (way.to) {
    case WayBack::To::TakeOver:
      return take_over(known, way.quorum);
    case WayBack::To::Join:
      commit(known, [&] { known_.place = places[way.node]; });
      bring_up_to_date(*stores[way.node], known);
      return stores[way.node];
    case WayBack::To::Follow:
      return {};
    case WayBack::To::Nowhere:
      break;
  }
  throw CommError(way.problem);
}

// Before anything else of this node is to be read there, whose workers may be of a round that the store does not know.
void Rendezvous::bring_up_to_date(c10d::Store& store, const Known& known) const {
  for (std::string there = store.get_to_str(key("round"));;) {
    const auto wanted = caught_up(read_round(there), known.job, known.server);
    if (!wanted) return;
    const std::string found = store.compareSet(key("round"), there, write_round(*wanted));
    if (found == write_round(*wanted)) return;
    there = found;
  }
}

Rendezvous::Store Rendezvous::take_over(const Known& known, int quorum) {
  if (!spare_) throw CommError("the node that served the rendezvous is gone, and a job of one node has no other");
  Store store = spare_->clone();
  commit(known, [&] {
    spare_serves_ = true;
    known_.place = {node_.address, node_.spare_port};
  });
  say_that_we_serve(*store);
  store->compareSet(key("round"), "", write_round(taken_over(known.job, known.server, quorum)));
  return store;
}

}  // namespace tessera::launch
