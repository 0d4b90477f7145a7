#include "tessera/pipeline/split/clip_grad_norm.h"

#include <vector>

#include <ATen/ops/zeros.h>

#include "tessera/comm/call_site.h"
#include "tessera/comm/collectives.h"
#include "tessera/core/error.h"
#include "tessera/nn/gradient_dispatcher.h"
#include "tessera/nn/gradient_synchronizer.h"
#include "tessera/nn/names.h"
#include "tessera/nn/operator_watch.h"
#include "tessera/optim/clip.h"
#include "tessera/optim/clip_grad_norm.h"
#include "tessera/pipeline/split/shared_gradients.h"

namespace tessera::pipeline {

namespace {

/// Without the copies that another rank counts.
std::vector<optim::NormGroup> counted_here(std::vector<optim::NormGroup> groups, const SplitModel& model, const torch::nn::Module& own,
                                           const schedules::Schedule& schedule, int rank) {
  const auto parameters = own.named_parameters();
  for (const tape::SharedParameter& shared : model.shared()) {
    const at::Tensor* const copy = parameters.find(shared.name);
    const std::vector<int> holders = holders_of(shared, schedule);
    if (copy == nullptr || holders.size() < 2) continue;
    const GradientSynchronizer* const owner = nn::owner_of(*copy);
    const bool whole = owner == nullptr || owner->norm_group().size() == 1;  // of parts nothing is noted
    require(!whole || !copy->requires_grad() || !copy->grad().defined() || model.summed().of(shared.name, *copy) == SummedGradients::State::Summed,
            "clip_grad_norm: '", shared.name, "' is one parameter that stages on several ranks hold, and this rank's gradient is a term of its sum: call ",
            "sum_shared_gradients behind the executor's run, before clipping and the update, or the copies drift apart");
    if (holders.front() == rank) continue;
    for (auto& group : groups) std::erase_if(group.parameters, [&](const auto& parameter) { return nn::updated_for(parameter.tensor).is_same(*copy); });
  }
  return groups;
}

}  // namespace

at::Tensor clip_grad_norm(const SplitModel& model, const schedules::Schedule& schedule, const comm::Group& ranks, double max_norm) {
  require(max_norm > 0, "clip_grad_norm: max_norm = ", max_norm, ": a norm above 0 is expected");
  const nn::Unwatched quietly;
  const auto own = model.module(schedule.stages_of(ranks.rank()));
  const auto all = optim::norm_groups(*own);
  const auto counted = counted_here(all, model, *own, schedule, ranks.rank());
  at::Tensor norm = counted.empty() ? at::zeros({}, at::kDouble) : optim::global_norm(counted);
  if (ranks.size() > 1) {
    const comm::CallSite site("norm");
    const at::Tensor square = norm.square();
    comm::all_reduce(ranks, square);
    norm = square.sqrt();
  }
  optim::clip_gradients(all, norm, max_norm);
  return norm;
}

}  // namespace tessera::pipeline
