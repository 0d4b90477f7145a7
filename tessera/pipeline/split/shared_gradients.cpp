#include "tessera/pipeline/split/shared_gradients.h"

#include <algorithm>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros_like.h>

#include "tessera/comm/collectives.h"

namespace tessera::pipeline {

void sum_shared_gradients(const SplitModel& model, const schedules::Schedule& schedule, const comm::Group& ranks) {
  for (const tape::SharedParameter& shared : model.recording()->stages.shared) {
    std::vector<int> holders;  // ranks, that of the first stage first
    for (const int stage : shared.stages) {
      const int rank = schedule.rank_of[static_cast<size_t>(stage)];
      if (std::ranges::find(holders, rank) == holders.end()) holders.push_back(rank);
    }
    const auto mine = std::ranges::find(holders, ranks.rank());
    if (mine == holders.end() || holders.size() < 2) continue;
    const int stage = *std::ranges::find_if(shared.stages, [&](int s) { return schedule.rank_of[static_cast<size_t>(s)] == ranks.rank(); });
    const at::Tensor parameter = model.module(stage)->named_parameters()[shared.name];
    at::Tensor& gradient = parameter.mutable_grad();
    if (!gradient.defined()) gradient = at::zeros_like(parameter);
    if (mine != holders.begin()) {
      comm::send(ranks, gradient, holders.front());
      const at::Tensor sum = at::empty_like(gradient, at::MemoryFormat::Contiguous);
      comm::recv(ranks, sum, holders.front());
      gradient.copy_(sum);
      continue;
    }
    at::Tensor sum;
    for (size_t i = holders.size(); i-- > 1;) {
      const at::Tensor term = at::empty_like(gradient, at::MemoryFormat::Contiguous);
      comm::recv(ranks, term, holders[i]);
      sum = sum.defined() ? sum + term : term;
    }
    gradient.copy_(sum + gradient);
    for (size_t i = holders.size(); i-- > 1;) comm::send(ranks, gradient, holders[i]);
  }
}

}  // namespace tessera::pipeline
