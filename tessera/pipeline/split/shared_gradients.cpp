#include "tessera/pipeline/split/shared_gradients.h"

#include <algorithm>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include "tessera/comm/collectives.h"
#include "tessera/core/error.h"
#include "tessera/nn/gradient_dispatcher.h"
#include "tessera/nn/gradient_synchronizer.h"
#include "tessera/nn/names.h"
#include "tessera/pipeline/tied.h"

namespace tessera::pipeline {

namespace {

/// A parameter of which several ranks of the pipeline hold a copy.
struct Copies {
  const tape::SharedParameter* shared;
  std::vector<int> holders;  ///< ranks of the pipeline, that of the first stage first
  TiedCopies::Copy mine{.holder = -1, .tensor = {}};
  bool in_part = false;  ///< a wrapper keeps this rank's part of its gradient, in memory that every step writes anew

  SummedGradients::State summed(const SplitModel& model) const { return in_part ? SummedGradients::State::Own : model.summed().of(shared->name, mine.tensor); }
};

enum CopyState : int64_t { HasGradient = 1, Trained = 2, Held = 4, Summed = 8, Added = 16 };

/// What an optimizer updates in the parameter's place: itself, or this rank's part of it.
at::Tensor updated_in_place_of(const at::Tensor& parameter) {
  const GradientSynchronizer* const owner = nn::owner_of(parameter);
  if (owner == nullptr) return parameter;
  for (const auto& updated : owner->updated()) {
    if (nn::updated_for(updated.tensor).is_same(parameter)) return updated.tensor;
  }
  return parameter;
}

int64_t state_of_copy(const at::Tensor& copy, SummedGradients::State summed) {
  return Held | (copy.grad().defined() && copy.numel() > 0 ? HasGradient : 0) | (copy.requires_grad() ? Trained : 0) |
         (summed == SummedGradients::State::Summed ? Summed : 0) | (summed == SummedGradients::State::Added ? Added : 0);
}

/// Whether there is something to sum: said alike on every rank, or refused on every one.
bool is_to_sum(const Copies& copies, const comm::Group& ranks, const std::vector<int64_t>& states) {
  bool any = false, all_summed = true, any_summed = false;
  const auto first = std::ranges::find_if(states, [](int64_t state) { return (state & Held) != 0; });
  for (auto state = first; state != states.end(); ++state) {
    if (!(*state & Held)) continue;
    const auto rank = [&](auto position) { return ranks.world_rank(static_cast<int>(position - states.begin())); };
    require((*state & Trained) == (*first & Trained), "pipeline: '", copies.shared->name, "' is one parameter that stages on several ranks hold, and is ",
            *first & Trained ? "trained" : "frozen", " on rank ", rank(first), " and not on rank ", rank(state), "; set requires_grad of all copies alike");
    any |= (*state & Trained) && (*state & HasGradient);
    all_summed = all_summed && (*state & Summed);
    any_summed |= (*state & (Summed | Added)) != 0;
  }
  require(
      !any_summed || all_summed, "pipeline: the gradient of '", copies.shared->name,
      "', which stages on several ranks hold, was summed by sum_shared_gradients, and has had more from backward passes since, without a zero_grad: what was "
      "summed would count once for each rank; call it once a step, behind the last run of an executor");
  return any && !all_summed;
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

void sum_shared_gradients(const SplitModel& model, const schedules::Schedule& schedule, const comm::Group& pipeline, const comm::Group& everyone) {
  std::vector<Copies> all;
  for (const tape::SharedParameter& shared : model.shared()) {
    Copies copies{.shared = &shared, .holders = holders_of(shared, schedule)};
    if (copies.holders.size() < 2) continue;
    if (const auto found = std::ranges::find(copies.holders, pipeline.rank()); found != copies.holders.end()) {
      const at::Tensor parameter = model.module(schedule.stages_of(pipeline.rank()))->named_parameters()[shared.name];
      copies.mine = {.holder = static_cast<int>(found - copies.holders.begin()), .tensor = updated_in_place_of(parameter)};
      copies.in_part = !copies.mine.tensor.is_same(parameter);
    }
    all.push_back(std::move(copies));
  }
  if (all.empty()) return;
  const comm::Group& ranks = everyone.size() > 1 ? everyone : pipeline;
  const auto count = static_cast<int64_t>(all.size());
  const at::Tensor mine = at::zeros({count}, at::device(at::kCPU).dtype(at::kLong)), states = at::empty({ranks.size(), count}, mine.options());
  for (int64_t i = 0; i < count; ++i) {
    const Copies& copies = all[static_cast<size_t>(i)];
    if (const at::Tensor& copy = copies.mine.tensor; copy.defined()) {
      mine.mutable_data_ptr<int64_t>()[i] = state_of_copy(copy, copies.summed(model));
    }
  }
  comm::all_gather(ranks, states, mine);
  for (int64_t i = 0; i < count; ++i) {
    std::vector<int64_t> of_rank;
    for (int rank = 0; rank < ranks.size(); ++rank) of_rank.push_back(states.const_data_ptr<int64_t>()[rank * count + i]);
    const Copies& copies = all[static_cast<size_t>(i)];
    if (!is_to_sum(copies, ranks, of_rank)) continue;
    const at::Tensor& copy = copies.mine.tensor;
    TiedCopies tied(ranks, static_cast<int>(copies.holders.size()), copy.defined() ? std::vector{copies.mine} : std::vector<TiedCopies::Copy>());
    tied.check_complete(copies.shared->name);
    if (copy.defined() && !copy.grad().defined()) copy.mutable_grad() = at::zeros_like(copy);
    tied.sum();
    if (copy.defined() && !copies.in_part) model.summed().note(copies.shared->name, copy);
  }
}

}  // namespace tessera::pipeline
