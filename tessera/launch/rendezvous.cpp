#include "tessera/launch/rendezvous.h"

#include <algorithm>
#include <chrono>
#include <random>
#include <thread>
#include <utility>

#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>
#include <unistd.h>

#include "tessera/core/error.h"
#include "tessera/launch/stores.h"

namespace tessera::launch {
namespace {

using namespace std::chrono_literals;

constexpr auto patience = 2s;

std::string host_name() {
  char name[256] = "node";
  gethostname(name, sizeof name - 1);
  return name;
}

/// Process ids repeat across containers of one host name.
std::string unique_id() { return detail::concat(host_name(), '_', getpid(), '_', std::random_device{}() % 10000); }

bool is_gone(const Node& node) { return node.spare_port != 0 && comm::probe({node.address, node.spare_port}, 500ms).refused; }

}  // namespace

Rendezvous::Rendezvous(RendezvousOptions options) : options_(std::move(options)), place_(options_.endpoint.value_or(comm::Endpoint{"localhost", 0})) {
  node_ = {.id = unique_id(), .address = options_.local_address, .nproc = options_.nproc, .order = options_.node_rank};
  if (!options_.endpoint) {
    node_.address = "127.0.0.1";
    alone_ = c10::make_intrusive<c10d::HashStore>();
  } else if (options_.rules.max_nodes > 1) {
    spare_ = serve_store({comm::is_loopback(place_.host) ? place_.host : "0.0.0.0", 0});
    node_.spare_port = spare_->getPort();
  }
}

Node Rendezvous::node() const {
  const std::lock_guard lock(mutex_);
  return node_;
}

std::string Rendezvous::place() const {
  const std::lock_guard lock(mutex_);
  return comm::describe(place_);
}

bool Rendezvous::serves() const {
  const std::lock_guard lock(mutex_);
  return served_ != nullptr || spare_serves_;
}

void Rendezvous::note(const Round& round) {
  const std::lock_guard lock(mutex_);
  job_ = round;
}

std::unique_ptr<Board> Rendezvous::connect() {
  Round initial{.nnodes = detail::concat(options_.rules.min_nodes, ':', options_.rules.max_nodes)};
  if (alone_) return board_on(alone_, initial);
  std::unique_lock lock(mutex_);
  const comm::Endpoint place = place_;
  const bool again = met_ && (job_.phase == Phase::Running || job_.phase == Phase::Stopping);  // otherwise nothing is lost by beginning anew
  if (again) initial = job_;
  lock.unlock();
  Store store = again ? meet_again(place) : first_meeting();
  const std::string server = store->get_to_str(key("server"));  // waits for it: whoever serves has just begun to
  lock.lock();
  met_ = true;
  server_ = server;
  lock.unlock();
  return board_on(std::move(store), initial);
}

std::unique_ptr<Board> Rendezvous::board_on(Store store, const Round& initial) {
  return std::make_unique<Board>(std::move(store), key(""), node_.id, initial, is_gone);
}

Rendezvous::Store Rendezvous::first_meeting() {
  const comm::Endpoint& endpoint = *options_.endpoint;
  std::optional<bool> must_serve = options_.serves;
  if (!must_serve && options_.node_rank >= 0) must_serve = options_.node_rank == 0;
  if (must_serve.value_or(comm::is_local(endpoint.host))) {
    if (c10::intrusive_ptr<c10d::TCPStore> store = serve_store(endpoint)) {
      c10d::Store& keys = *store;  // strings as values: its base's
      keys.set(key("server"), node_.id);
      const std::lock_guard lock(mutex_);
      served_ = store;
      place_.port = store->getPort();
      if (node_.address.empty()) node_.address = endpoint.host;
      return store->clone();
    }
    if (must_serve) throw CommError("Address already in use");
  }
  const comm::Probe probe = comm::probe(endpoint, patience);
  if (!probe.problem.empty()) throw CommError(probe.problem);
  Store store = join_store(endpoint, patience);
  const std::lock_guard lock(mutex_);
  if (node_.address.empty()) node_.address = probe.local_address;
  return store;
}

Rendezvous::Store Rendezvous::meet_again(const comm::Endpoint& lost) {
  const comm::Probe probe = comm::probe(lost, patience);
  if (probe.problem.empty()) {
    try {
      return join_store(lost, patience);
    } catch (const std::exception&) {  // its process is stopped, or another one has the port
    }
  }
  std::unique_lock lock(mutex_);
  const Round job = job_;
  const std::string server = server_;
  lock.unlock();
  return meet_at_spare(job, server, probe.refused);
}

Rendezvous::Store Rendezvous::meet_at_spare(const Round& job, const std::string& server, bool proven) {
  for (const Node& node : job.nodes) {
    if (node.id == server) continue;
    if (node.id == node_.id) return take_over(job, server, proven);
    const comm::Endpoint spare{node.address, node.spare_port};
    const comm::Probe probe = comm::probe(spare, patience);
    if (!probe.problem.empty()) {
      proven = proven && probe.refused;  // it may have taken over where we do not reach it
      continue;
    }
    Store store = join_store(spare, patience);
    store->set(key("came/" + node_.id), "");
    if (!store->check({key("round")})) throw CommError(detail::concat("node ", node.id, " has not taken over"));
    const std::lock_guard lock(mutex_);
    place_ = spare;
    return store;
  }
  throw CommError("this node is no member, and no other one is left");
}

Rendezvous::Store Rendezvous::take_over(const Round& job, const std::string& server, bool proven) {
  Store store = spare_->clone();
  const auto came = 1 + std::ranges::count_if(job.nodes, [&](const Node& node) { return node.id != node_.id && store->check({key("came/" + node.id)}); });
  const auto all = static_cast<int64_t>(job.nodes.size());
  if (!proven && (2 * came <= all || came < options_.rules.min_nodes)) {
    throw CommError(detail::concat("its host does not answer, and ", came, " of ", all, " nodes cannot tell whether the others go on without them"));
  }
  Round next = job;
  std::erase_if(next.nodes, [&](const Node& node) { return node.id == server; });
  next.phase = Phase::Stopping;
  next.cause = Cause::Lost;
  next.reason = detail::concat("node ", server, ", which served the rendezvous, vanished");
  store->set(key("server"), node_.id);
  store->compareSet(key("round"), "", write_round(next));  // another thread of ours, left behind, may have been here before
  const std::lock_guard lock(mutex_);
  spare_serves_ = true;
  place_ = {node_.address, node_.spare_port};
  return store;
}

}  // namespace tessera::launch
