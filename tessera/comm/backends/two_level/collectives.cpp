#include "tessera/comm/backends/two_level/collectives.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include "tessera/comm/collectives.h"

namespace tessera::comm {

// Scratch lives until the collective ends, and is made on whatever thread runs it.

void TwoLevelCollectives::all_reduce(const at::Tensor& tensor, Op op) const {
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

void TwoLevelCollectives::reduce(const at::Tensor& tensor, int root, Op op) const {
  const auto& [hosts, local, across, flat] = levels_;
  const int host = hosts.host(root), place = hosts.local_rank(root);
  comm::reduce(local, tensor, 0, op);
  if (leads()) comm::reduce(across, tensor, host, op);
  if (place == 0 || hosts.host(rank_) != host) return;
  if (leads()) comm::send(local, tensor, place);
  if (rank_ == root) comm::recv(local, tensor, 0);
}

void TwoLevelCollectives::broadcast(const at::Tensor& tensor, int root) const {
  const auto& [hosts, local, across, flat] = levels_;
  const int host = hosts.host(root);
  const bool roots_host = hosts.host(rank_) == host;
  if (roots_host) comm::broadcast(local, tensor, hosts.local_rank(root));
  if (leads()) comm::broadcast(across, tensor, host);
  if (!roots_host) comm::broadcast(local, tensor, 0);
}

namespace {

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

}  // namespace

void TwoLevelCollectives::all_gather(const at::Tensor& out, const at::Tensor& in) const {
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

void TwoLevelCollectives::reduce_scatter(const at::Tensor& out, const at::Tensor& in, Op op) const {
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

void TwoLevelCollectives::barrier() const {
  comm::barrier(levels_.local);
  if (leads()) comm::barrier(levels_.across);
  comm::barrier(levels_.local);
}

}  // namespace tessera::comm
