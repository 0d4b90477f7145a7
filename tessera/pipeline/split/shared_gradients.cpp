#include "tessera/pipeline/split/shared_gradients.h"

#include <algorithm>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include "tessera/comm/collectives.h"
#include "tessera/core/error.h"
#include "tessera/nn/gradient_dispatcher.h"
#include "tessera/nn/gradient_synchronizer.h"

namespace tessera::pipeline {

namespace {

/// A parameter of which several ranks hold a copy.
struct Copies {
  const tape::SharedParameter* shared;
  std::vector<int> holders;  ///< ranks, that of the first stage first
  at::Tensor mine{};         ///< undefined where this rank holds none
};

enum CopyState : int64_t { HasGradient = 1, Trained = 2, InParts = 4 };

/// Of what an optimizer updates in the parameter's place there is a part on each rank.
bool is_in_parts(const at::Tensor& parameter) {
  const auto* const dispatcher = nn::GradientDispatcher::find(parameter);
  const GradientSynchronizer* const owner = dispatcher == nullptr ? nullptr : dispatcher->owner();
  return owner != nullptr && std::ranges::none_of(owner->updated(), [&](const auto& updated) { return updated.tensor.is_same(parameter); });
}

int64_t state_of_copy(const at::Tensor& parameter) {
  return (parameter.grad().defined() ? HasGradient : 0) | (parameter.requires_grad() ? Trained : 0) | (is_in_parts(parameter) ? InParts : 0);
}

/// Whether there is something to sum: said alike on every rank, or refused on every one.
bool is_to_sum(const Copies& copies, const std::vector<int64_t>& state_of_rank) {
  bool any = false;
  for (const int rank : copies.holders) {
    const int64_t state = state_of_rank[static_cast<size_t>(rank)], first = state_of_rank[static_cast<size_t>(copies.holders.front())];
    require(!(state & InParts), "pipeline: '", copies.shared->name, "' is shared by stages on several ranks, and on rank ", rank,
            " a wrapper keeps its gradient in parts, which do not meet; wrap such a stage in DistributedDataParallel, or split so that one rank holds it");
    require((state & Trained) == (first & Trained), "pipeline: '", copies.shared->name, "' is one parameter that stages on several ranks hold, and is ",
            first & Trained ? "trained" : "frozen", " on rank ", copies.holders.front(), " and not on rank ", rank, "; set requires_grad of all copies alike");
    any |= (state & Trained) && (state & HasGradient);
  }
  return any;
}

void sum_copies(const Copies& copies, const comm::Group& ranks) {
  at::Tensor& gradient = copies.mine.mutable_grad();
  if (!gradient.defined()) gradient = at::zeros_like(copies.mine);
  if (ranks.rank() != copies.holders.front()) {
    comm::send(ranks, gradient, copies.holders.front());
    const at::Tensor sum = at::empty_like(gradient, at::MemoryFormat::Contiguous);
    comm::recv(ranks, sum, copies.holders.front());
    gradient.copy_(sum);
    return;
  }
  at::Tensor sum;
  for (size_t i = copies.holders.size(); i-- > 1;) {
    const at::Tensor term = at::empty_like(gradient, at::MemoryFormat::Contiguous);
    comm::recv(ranks, term, copies.holders[i]);
    sum = sum.defined() ? sum + term : term;
  }
  gradient.copy_(sum + gradient);
  for (size_t i = copies.holders.size(); i-- > 1;) comm::send(ranks, gradient, copies.holders[i]);
}

}  // namespace

std::vector<int> holders_of(const tape::SharedParameter& shared, const schedules::Schedule& schedule) {
  std::vector<int> holders;
  for (const int stage : shared.stages) {
    const int rank = schedule.rank_of[static_cast<size_t>(stage)];
    if (std::ranges::find(holders, rank) == holders.end()) holders.push_back(rank);
  }
  return holders;
}

void sum_shared_gradients(const SplitModel& model, const schedules::Schedule& schedule, const comm::Group& ranks) {
  std::vector<Copies> all;
  for (const tape::SharedParameter& shared : model.shared()) {
    Copies copies{.shared = &shared, .holders = holders_of(shared, schedule)};
    if (copies.holders.size() < 2) continue;
    if (std::ranges::find(copies.holders, ranks.rank()) != copies.holders.end())
      copies.mine = model.module(schedule.stages_of(ranks.rank()))->named_parameters()[shared.name];
    all.push_back(std::move(copies));
  }
  if (all.empty()) return;
  const auto count = static_cast<int64_t>(all.size());
  const at::Tensor mine = at::zeros({count}, at::device(at::kCPU).dtype(at::kLong)), states = at::empty({ranks.size(), count}, mine.options());
  for (int64_t i = 0; i < count; ++i) {
    if (const Copies& copies = all[static_cast<size_t>(i)]; copies.mine.defined()) mine.mutable_data_ptr<int64_t>()[i] = state_of_copy(copies.mine);
  }
  comm::all_gather(ranks, states, mine);
  for (int64_t i = 0; i < count; ++i) {
    std::vector<int64_t> of_rank;
    for (int rank = 0; rank < ranks.size(); ++rank) of_rank.push_back(states.const_data_ptr<int64_t>()[rank * count + i]);
    const Copies& copies = all[static_cast<size_t>(i)];
    if (is_to_sum(copies, of_rank) && copies.mine.defined()) sum_copies(copies, ranks);
  }
}

}  // namespace tessera::pipeline
