#include "tessera/pipeline/weight_versions.h"

#include <utility>

#include <ATen/autocast_mode.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/clone.h>

#include "tessera/core/attachment.h"
#include "tessera/core/error.h"
#include "tessera/memory/memory.h"
#include "tessera/nn/parameter.h"

// Autograd saves a parameter as itself and a view of it (the transpose that a linear layer multiplies by) as a view of its memory, each with the number of
// writes that their common counter had. With a memory and a counter for every version both find in backward what they had in forward: the view because its
// memory is never written again, the parameter because it has that memory and that counter once more while the action runs. Anything else is refused by
// autograd, as ever. Autocast knows a weight by its tensor, which is one for all versions: what it has cast of one is forgotten where the next takes its place.

namespace tessera::pipeline {

WeightVersions::WeightVersions(std::vector<at::Tensor> parameters, const schedules::RankActions& actions, int stage) : parameters_(std::move(parameters)) {
  for (const at::Tensor& parameter : parameters_)
    invariant(!nn::keeps_memory(parameter), "versions of '", nn::slice_of(parameter).name, "', whose memory is part of another's");
  for (const schedules::Action& listed : actions) {
    for (const schedules::Action& action : schedules::parts(listed)) {
      if (action.stage == stage && action.computes()) ++uses_[action.version];
    }
  }
}

WeightVersions::Values WeightVersions::current() const {
  Values values;
  for (const at::Tensor& parameter : parameters_) {
    auto* const impl = parameter.unsafeGetTensorImpl();
    values.emplace_back(impl->shallow_copy_and_detach(impl->version_counter(), /*allow_tensor_metadata_change=*/true));
  }
  return values;
}

void WeightVersions::put(const Values& values) const {
  const at::NoGradGuard no_grad;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    nn::set_data_of_same(parameters_[i], values[i]);
    parameters_[i].unsafeGetTensorImpl()->set_version_counter(values[i].unsafeGetTensorImpl()->version_counter());
  }
  at::autocast::clear_cache();
}

void WeightVersions::with(int version, const std::function<void()>& action) {
  int& uses = uses_[version];
  invariant(uses > 0, "an action computes with version ", version, " of weights, and the schedule has none that does");
  if (version == newest_) {
    action();
  } else {
    const auto found = older_.find(version);
    invariant(found != older_.end(), "version ", version, " of weights is not there; the newest is ", newest_);
    const Attachment restored([this, newest = current()] { put(newest); });
    put(found->second);
    action();
  }
  if (--uses == 0) older_.erase(version);
}

void WeightVersions::update(const std::function<void()>& update) {
  if (uses_[newest_] > 0) {
    const at::NoGradGuard no_grad;
    const MemoryScope scope(MemoryCategory::Parameters);
    Values next;
    for (const at::Tensor& parameter : parameters_) next.push_back(parameter.detach().clone());
    older_[newest_] = current();
    put(next);
  }
  ++newest_;
  update();
  at::autocast::clear_cache();
}

}  // namespace tessera::pipeline
