#include "tessera/pipeline/tied.h"

#include <algorithm>
#include <tuple>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include "tessera/comm/call_site.h"
#include "tessera/comm/collectives.h"
#include "tessera/core/error.h"
#include "tessera/core/host_read.h"
#include "tessera/layout/slice.h"
#include "tessera/nn/names.h"
#include "tessera/nn/parameter.h"
#include "tessera/nn/sharing.h"

namespace tessera::pipeline {
namespace {

constexpr const char* kTiedSite = "pipeline.tied";
constexpr int64_t kMostRuns = 8;                        // of one slice: a run of elements is at most three rectangles of a matrix
constexpr int64_t kEntry = 1 + 2 * kMostRuns;           // of a copy, as ranks tell each other: how many runs, and each
using Runs = std::vector<std::pair<int64_t, int64_t>>;  // first element of the logical tensor, and how many

/// Of a slice, in the order in which they lie in the local tensor.
Runs runs_of(const Slice& slice) {
  invariant(slice.concat_dim() <= 0, "the parts of '", slice.name, "' lie side by side");
  Runs runs;
  for (const Box& box : slice.boxes) {
    for_each_run(slice.shape, box, [&](int64_t first, int64_t count) {
      if (!runs.empty() && runs.back().first + runs.back().second == first) {
        runs.back().second += count;
      } else if (count > 0) {
        runs.emplace_back(first, count);
      }
    });
  }
  return runs;
}

Runs runs_in(const int64_t* entry) {
  Runs runs;
  for (int64_t i = 0; i < entry[0]; ++i) runs.emplace_back(entry[1 + 2 * i], entry[2 + 2 * i]);
  return runs;
}

/// The elements of `mine` that are in `theirs`, in ascending order, as runs of my local tensor.
Runs shared(const Runs& mine, const Runs& theirs) {
  std::vector<std::pair<int64_t, std::pair<int64_t, int64_t>>> found;  // by logical place
  int64_t local = 0;
  for (const auto& [first, count] : mine) {
    for (const auto& [other_first, other_count] : theirs) {
      const int64_t begin = std::max(first, other_first), end = std::min(first + count, other_first + other_count);
      if (begin < end) found.push_back({begin, {local + begin - first, end - begin}});
    }
    local += count;
  }
  std::ranges::sort(found);
  Runs runs;
  for (const auto& [place, run] : found) runs.push_back(run);
  return runs;
}

/// Elements in the order of the logical tensor, as both ends have them.
at::Tensor packed(const at::Tensor& tensor, const Runs& runs) {
  const at::Tensor flat = tensor.reshape({-1});
  std::vector<at::Tensor> pieces;
  for (const auto& [first, count] : runs) pieces.push_back(flat.narrow(0, first, count));
  return at::cat(pieces);
}

/// Calls use(part of `tensor`, part of `elements`) for each run.
void unpack(const at::Tensor& tensor, const Runs& runs, const at::Tensor& elements, auto&& use) {
  const at::Tensor flat = tensor.view({-1});
  int64_t at = 0;
  for (const auto& [first, count] : runs) {
    use(flat.narrow(0, first, count), elements.narrow(0, at, count));
    at += count;
  }
}

End other_than(End end) { return end == End::First ? End::Last : End::First; }

}  // namespace

TiedCopies::TiedCopies(comm::Group ranks, const std::vector<Copy>& copies, bool last_follows)
    : ranks_(std::move(ranks)), copies_(copies), last_follows_(last_follows) {
  const comm::CallSite site(kTiedSite);
  const at::Tensor mine = at::zeros({2, kEntry}, at::device(at::kCPU).dtype(at::kLong));
  for (const Copy& copy : copies_) {
    if (copy.end == End::Last && !last_follows)
      nn::add_sharing(nn::updated_for(copy.tensor), {.axis = kTiedSite, .rank = 1, .first = 0, .holders = 2});  // counted at the other end
    const Runs runs = runs_of(nn::slice_of(copy.tensor));
    invariant(std::ssize(runs) <= kMostRuns, "a slice of '", nn::slice_of(copy.tensor).name, "' has ", runs.size(), " runs");
    int64_t* const entry = mine.mutable_data_ptr<int64_t>() + (copy.end == End::Last ? kEntry : 0);
    entry[0] = std::ssize(runs);
    for (size_t i = 0; i < runs.size(); ++i) entry[1 + 2 * i] = runs[i].first, entry[2 + 2 * i] = runs[i].second;
  }
  const at::Tensor all = at::zeros({2 * ranks_.size(), kEntry}, mine.options());
  all.narrow(0, 2 * ranks_.rank(), 2).copy_(mine);  // what a dry run, where nobody answers, knows of the tables
  comm::all_gather(ranks_, all, mine);
  for (size_t c = 0; c < copies_.size(); ++c) {
    const Runs own = runs_of(nn::slice_of(copies_[c].tensor));
    for (int peer = 0; peer < ranks_.size(); ++peer) {
      const int64_t other_end = copies_[c].end == End::Last ? 0 : 1;
      Exchange exchange{.copy = c, .peer = peer, .runs = shared(own, runs_in(all.const_data_ptr<int64_t>() + (2 * peer + other_end) * kEntry))};
      for (const auto& [first, count] : exchange.runs) exchange.numel += count;
      if (exchange.numel > 0) exchanges_.push_back(std::move(exchange));
    }
  }
}

std::vector<at::Tensor> TiedCopies::pass(const std::vector<End>& senders, const Which& which) const {
  const auto sends = [&](End end) { return std::ranges::find(senders, end) != senders.end(); };
  std::vector<at::Tensor> leaving(exchanges_.size()), coming(exchanges_.size());
  std::vector<comm::Pending> pending;
  for (size_t i = 0; i < exchanges_.size(); ++i) {
    const auto& [copy, peer, runs, numel] = exchanges_[i];
    const auto& [end, tensor] = copies_[copy];
    if (sends(end)) leaving[i] = packed(which(tensor), runs);
    if (sends(other_than(end))) coming[i] = at::empty({numel}, which(tensor).options());
  }
  const auto tag = [](End end) { return end == End::First ? 0 : 1; };
  // Two ranks post the messages between them in one order, the lower rank's first, for engines that match by order alone.
  std::vector<std::tuple<int, int, int, size_t>> order;  // peer, sender, tag, exchange
  for (size_t i = 0; i < exchanges_.size(); ++i) {
    const auto& [copy, peer, runs, numel] = exchanges_[i];
    if (peer == ranks_.rank()) continue;
    if (coming[i].defined()) order.emplace_back(peer, peer, tag(other_than(copies_[copy].end)), i);
    if (leaving[i].defined()) order.emplace_back(peer, ranks_.rank(), tag(copies_[copy].end), i);
  }
  std::ranges::sort(order);
  for (const auto& [peer, sender, tag, i] : order) {
    pending.push_back(sender == peer ? comm::recv_async(ranks_, coming[i], peer, tag) : comm::send_async(ranks_, leaving[i], peer, tag));
  }
  for (size_t i = 0; i < exchanges_.size(); ++i) {
    if (exchanges_[i].peer != ranks_.rank() || !coming[i].defined()) continue;
    const auto other =
        std::ranges::find_if(exchanges_, [&](const Exchange& exchange) { return exchange.peer == ranks_.rank() && exchange.copy != exchanges_[i].copy; });
    coming[i] = leaving[static_cast<size_t>(other - exchanges_.begin())];
  }
  for (auto& one : pending) one.wait();
  return coming;
}

void TiedCopies::sum() {
  const at::NoGradGuard no_grad;
  const comm::CallSite site(kTiedSite);
  for (const Copy& copy : copies_) {
    if (!copy.tensor.requires_grad()) return;  // frozen, at both ends
    invariant(copy.tensor.numel() == 0 || copy.tensor.grad().defined(), "'", nn::slice_of(copy.tensor).name, "' has no gradient");
  }
  const auto terms = pass(last_follows_ ? std::vector{End::Last} : std::vector{End::First, End::Last}, [](const at::Tensor& tensor) { return tensor.grad(); });
  for (size_t i = 0; i < exchanges_.size(); ++i) {
    if (!terms[i].defined()) continue;
    unpack(copies_[exchanges_[i].copy].tensor.grad(), exchanges_[i].runs, terms[i], [](at::Tensor sum, const at::Tensor& term) { sum.add_(term); });
  }
}

void TiedCopies::follow() {
  if (!last_follows_) return;
  const at::NoGradGuard no_grad;
  const comm::CallSite site(kTiedSite);
  const auto values = pass({End::First}, [](const at::Tensor& tensor) { return tensor.detach(); });
  for (size_t i = 0; i < exchanges_.size(); ++i) {
    if (!values[i].defined()) continue;
    unpack(copies_[exchanges_[i].copy].tensor, exchanges_[i].runs, values[i], [](at::Tensor own, const at::Tensor& value) { own.copy_(value); });
  }
}

}  // namespace tessera::pipeline
