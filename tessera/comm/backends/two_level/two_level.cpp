#include "tessera/comm/backends/two_level/two_level.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include "tessera/comm/backends/work_queue.h"
#include "tessera/comm/collectives.h"
#include "tessera/comm/engine.h"
#include "tessera/comm/tags.h"
#include "tessera/comm/uncounted_writes.h"
#include "tessera/core/error.h"

// The levels are groups like any others, so each collective is a few calls of collectives, one after the other. They block, which is why they run on a thread
// of this group's own where the caller does not wait. Hosts with different numbers of members cannot pair up by place, and go by their leaders.

namespace tessera::comm {
namespace {

// Below this an all_reduce's three short messages inside a host cost more than sending every byte between hosts once per member.
constexpr int64_t kSmallest = 16 << 10;

// blocks [n, ...] of a host's members -> rows [members, ...]: a view where they lie side by side, else new memory, not yet filled.
at::Tensor rows_for(const Hosts& hosts, int host, const at::Tensor& blocks) {
  const auto& members = hosts.members(host);
  const auto count = static_cast<int64_t>(members.size());
  return hosts.adjacent(host) ? blocks.narrow(0, members[0], count) : at::empty({count, blocks.size(1)}, blocks.options());
}

void copy_rows(const Hosts& hosts, int host, const at::Tensor& rows, const at::Tensor& blocks) {
  for (size_t place = 0; place < hosts.members(host).size(); ++place) blocks[hosts.members(host)[place]].copy_(rows[place]);
}

at::Tensor packed_rows(const Hosts& hosts, int host, const at::Tensor& blocks) {
  const auto rows = rows_for(hosts, host, blocks);
  if (!hosts.adjacent(host)) {
    for (size_t place = 0; place < hosts.members(host).size(); ++place) rows[place].copy_(blocks[hosts.members(host)[place]]);
  }
  return rows;
}

class TwoLevelEngine : public Engine {
 public:
  TwoLevelEngine(const GroupInfo& group, Levels levels) : levels_(std::move(levels)), rank_(group.rank) {}

  std::string name() const override { return "two_level"; }

  Work start(const Call& call) override {
    switch (call.op) {
      case Operation::Send:
      case Operation::Recv:
        return pass_on(call);
      case Operation::AllToAll:
      case Operation::Gather:
      case Operation::Scatter:
        return levels_.flat.engine()->start(call);
      default:
        return queue_.run([this, call] { carry_out(call); }, call.async);
    }
  }

  void set_timeout(std::chrono::milliseconds timeout) override {
    for (const auto& engine : engines()) engine->set_timeout(timeout);
  }
  void abort() override {
    queue_.abort();
    for (const auto& engine : engines()) engine->abort();
  }
  void shutdown() override {
    for (const auto& engine : engines()) engine->shutdown();
  }

  // Memory in which a host's members reduce in place.
  at::Tensor empty(int64_t elements, const at::TensorOptions& options) override {
    return levels_.local.engine() ? levels_.local.engine()->empty(elements, options) : at::Tensor();
  }

 private:
  std::vector<std::shared_ptr<Engine>> engines() const {
    std::vector<std::shared_ptr<Engine>> engines;
    for (const auto* group : {&levels_.local, &levels_.across, &levels_.flat}) {
      if (group->engine()) engines.push_back(group->engine());
    }
    return engines;
  }

  // Engines take messages beside collectives, so they need not queue: two ranks that send to each other first must not wait for each other.
  Work pass_on(const Call& call) const {
    const auto& hosts = levels_.hosts;
    if (hosts.host(call.peer) != hosts.host(rank_)) return levels_.flat.engine()->start(call);
    auto local = call;
    local.peer = hosts.local_rank(call.peer);
    return levels_.local.engine()->start(local);
  }

  void carry_out(const Call& call) const {
    const UncountedWrites caller_counts;
    switch (call.op) {
      case Operation::AllReduce:
        return all_reduce(call.outputs[0], *call.reduction);
      case Operation::Reduce:
        return reduce(call.outputs[0], call.peer, *call.reduction);
      case Operation::Broadcast:
        return broadcast(call.outputs[0], call.peer);
      case Operation::AllGather:
        return all_gather(call.outputs[0], call.inputs[0]);
      case Operation::ReduceScatter:
        return reduce_scatter(call.outputs[0], call.inputs[0], *call.reduction);
      default:
        return barrier();
    }
  }

  void all_reduce(const at::Tensor& tensor, Op op) const;
  void reduce(const at::Tensor& tensor, int root, Op op) const;
  void broadcast(const at::Tensor& tensor, int root) const;
  void all_gather(const at::Tensor& out, const at::Tensor& in) const;
  void reduce_scatter(const at::Tensor& out, const at::Tensor& in, Op op) const;
  void barrier() const;

  bool even() const { return levels_.hosts.even(); }
  bool leads() const { return levels_.hosts.local_rank(rank_) == 0; }

  const Levels levels_;
  const int rank_;
  WorkQueue queue_;  // last: it ends first
};

// Scratch lives until the collective ends, and is made on whatever thread runs it.

void TwoLevelEngine::all_reduce(const at::Tensor& tensor, Op op) const {
  const auto& [hosts, local, across, flat] = levels_;
  if (!even()) {
    comm::reduce(local, tensor, 0, op);
    if (leads()) comm::all_reduce(across, tensor, op);
    comm::broadcast(local, tensor, 0);
    return;
  }
  const auto elements = tensor.view(-1);
  const int64_t share = static_cast<int64_t>(tensor.nbytes()) < kSmallest ? 0 : tensor.numel() / local.size();
  const int64_t shared = share * local.size();
  if (share > 0) {
    const auto mine = at::empty({share}, tensor.options());
    const auto whole = elements.narrow(0, 0, shared);
    comm::reduce_scatter(local, mine, whole, op);
    comm::all_reduce(across, mine, op);
    comm::all_gather(local, whole, mine);
  }
  if (shared == tensor.numel()) return;
  const auto rest = elements.narrow(0, shared, tensor.numel() - shared);
  comm::all_reduce(local, rest, op);
  comm::all_reduce(across, rest, op);
}

void TwoLevelEngine::reduce(const at::Tensor& tensor, int root, Op op) const {
  const auto& [hosts, local, across, flat] = levels_;
  const int host = hosts.host(root), place = hosts.local_rank(root);
  comm::reduce(local, tensor, 0, op);
  if (leads()) comm::reduce(across, tensor, host, op);
  if (place == 0 || hosts.host(rank_) != host) return;
  // Callers' messages inside the host pass the same engine (pass_on): under a tag of theirs this one could be taken for one of them.
  if (leads()) local.engine()->start({.op = Operation::Send, .inputs = {tensor}, .peer = place, .tag = kHandOnTag, .async = false})->wait();
  if (rank_ == root) local.engine()->start({.op = Operation::Recv, .outputs = {tensor}, .peer = 0, .tag = kHandOnTag, .async = false})->wait();
}

void TwoLevelEngine::broadcast(const at::Tensor& tensor, int root) const {
  const auto& [hosts, local, across, flat] = levels_;
  const int host = hosts.host(root);
  const bool roots_host = hosts.host(rank_) == host;
  if (roots_host) comm::broadcast(local, tensor, hosts.local_rank(root));
  if (leads()) comm::broadcast(across, tensor, host);
  if (!roots_host) comm::broadcast(local, tensor, 0);
}

void TwoLevelEngine::all_gather(const at::Tensor& out, const at::Tensor& in) const {
  const auto& [hosts, local, across, flat] = levels_;
  const int64_t block = in.numel();
  const auto blocks = out.view({hosts.size(), block});
  if (even()) {
    const auto mine = at::empty({hosts.count(), block}, in.options());
    comm::all_gather(across, mine, in);
    for (int host = 0; host < hosts.count(); ++host) {
      const auto rows = rows_for(hosts, host, blocks);
      comm::all_gather(local, rows, mine[host]);
      if (!hosts.adjacent(host)) copy_rows(hosts, host, rows, blocks);
    }
    return;
  }
  if (leads()) {
    const int width = hosts.most_members();
    const auto mine = at::empty({width, block}, in.options()), gathered = at::empty({hosts.count(), width, block}, in.options());
    comm::gather(local, mine.narrow(0, 0, local.size()), in, 0);
    comm::all_gather(across, gathered, mine);
    for (int host = 0; host < hosts.count(); ++host) copy_rows(hosts, host, gathered[host], blocks);
  } else {
    comm::gather(local, {}, in, 0);
  }
  comm::broadcast(local, out, 0);
}

void TwoLevelEngine::reduce_scatter(const at::Tensor& out, const at::Tensor& in, Op op) const {
  const auto& [hosts, local, across, flat] = levels_;
  const int64_t block = out.numel();
  const auto blocks = in.view({hosts.size(), block});
  if (even()) {
    const auto mine = at::empty({hosts.count(), block}, in.options());
    for (int host = 0; host < hosts.count(); ++host) comm::reduce_scatter(local, mine[host], packed_rows(hosts, host, blocks), op);
    comm::reduce_scatter(across, out, mine, op);
    return;
  }
  // Padded to the largest host. Padding is summed too: garbage could be slow denormals.
  const auto ordered = at::zeros({hosts.count(), hosts.most_members(), block}, in.options());
  for (int host = 0; host < hosts.count(); ++host) {
    const auto rows = packed_rows(hosts, host, blocks);
    ordered[host].narrow(0, 0, rows.size(0)).copy_(rows);
  }
  comm::reduce(local, ordered, 0, op);
  if (!leads()) {
    comm::scatter(local, out, {}, 0);
    return;
  }
  const auto mine = at::empty({hosts.most_members(), block}, in.options());
  comm::reduce_scatter(across, mine, ordered, op);
  comm::scatter(local, out, mine.narrow(0, 0, local.size()), 0);
}

void TwoLevelEngine::barrier() const {
  comm::barrier(levels_.local);
  if (leads()) comm::barrier(levels_.across);
  comm::barrier(levels_.local);
}

}  // namespace

std::shared_ptr<Engine> make_two_level_engine(const GroupInfo& group, Levels levels) { return std::make_shared<TwoLevelEngine>(group, std::move(levels)); }

}  // namespace tessera::comm
