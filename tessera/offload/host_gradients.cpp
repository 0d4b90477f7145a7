#include "tessera/offload/host_gradients.h"

#include <algorithm>
#include <utility>

#include <c10/core/GradMode.h>

#include "tessera/core/error.h"
#include "tessera/memory/memory.h"
#include "tessera/nn/flat_gradients.h"
#include "tessera/nn/names.h"

// The synchronizer inside gives each gradient away as soon as it can (nn/gradient_relay.h), so that grad() on the device stays empty; what is left on the host
// when it is done are the gradients of the step.

namespace tessera {

HostGradients::HostGradients(std::unique_ptr<GradientSynchronizer> inner, const std::vector<nn::NamedParameter>& updated, std::shared_ptr<HostSums> sums)
    : sums_(std::move(sums)), link_(sums_->link()), inner_(std::move(inner)), parameters_(updated) {
  hold(*inner_);
  const c10::NoGradGuard no_grad;
  const MemoryScope scope(MemoryCategory::Parameters);
  const HostMemory beside;
  for (const auto& [name, tensor, aliases] : parameters_) {
    const at::Tensor copy = link_.empty(tensor.numel(), tensor.scalar_type()).view(tensor.sizes()).detach();
    nn::set_slice(copy, nn::slice_of(tensor));
    nn::set_updated_for(copy, nn::updated_for(tensor));
    copies_.push_back({name, copy, aliases});
    versions_.emplace_back();
    with_gradient_.push_back(0);
  }
  follow_frozen();
  follow();
}

HostGradients::~HostGradients() = default;

void HostGradients::follow() {
  const c10::NoGradGuard no_grad;
  for (size_t i = 0; i < parameters_.size(); ++i) take(i);
}

void HostGradients::take(size_t index) {
  copies_[index].tensor.copy_(parameters_[index].tensor);
  note_versions(index);
}

void HostGradients::note_versions(size_t index) { versions_[index] = {nn::WriteMark(parameters_[index].tensor), copies_[index].tensor._version()}; }

void HostGradients::begin_step() {
  const c10::NoGradGuard no_grad;
  clear_gradients();
  inner_->begin_step();  // which takes in what a program put in a parameter's place
  follow_frozen();
  for (size_t i = 0; i < parameters_.size(); ++i) {
    if (nn::WriteMark(parameters_[i].tensor) != versions_[i].parameter) take(i);
  }
}

/// Sums of terms over ranks (nn::sum_terms) and optimizers go by what is updated, and a program freezes and unfreezes the model's parameters.
void HostGradients::follow_frozen() const {
  for (size_t i = 0; i < parameters_.size(); ++i) copies_[i].tensor.set_requires_grad(parameters_[i].tensor.requires_grad());
}

std::vector<nn::NamedParameter> HostGradients::updated() const {
  (void)inner_->updated();  // which takes in what a program put in a parameter's place
  follow_frozen();
  return copies_;
}

void HostGradients::finish() {
  inner_->finish();
  for (size_t i = 0; i < parameters_.size(); ++i) {
    const at::Tensor sum = sums_->take(parameters_[i].tensor);
    // No view, which libtorch's zero_grad could not detach.
    copies_[i].tensor.mutable_grad() = sum.defined() ? gradient_view(sum, 0, copies_[i].tensor.sizes()) : sum;
    with_gradient_[i] = copies_[i].tensor.grad().defined() ? 1 : 0;
  }
  sums_->clear();
}

void HostGradients::after_update() {
  const c10::NoGradGuard no_grad;
  std::vector<size_t> changed;
  CopyStream::Point returned;
  {
    const CopyStream::Scope copying(link_.in);
    for (size_t i = 0; i < parameters_.size(); ++i) {
      const auto& [name, copy, aliases] = copies_[i];
      // What nobody updates may follow another's update (an embedding's second end on one rank); libtorch's SGD writes behind the version counter, and is not
      // the only optimizer that comes after one backward pass.
      if (with_gradient_[i] == 0 && copy._version() == versions_[i].copy) continue;
      at::Tensor(parameters_[i].tensor).copy_(copy, /*non_blocking=*/true);
      changed.push_back(i);
    }
    returned = link_.in.point();
  }
  returned.hold_device();  // gradients leave behind it, and the host waits for one before it writes a copy again
  inner_->after_update();
  for (const size_t i : changed) note_versions(i);  // parts of a bucket have one counter
}

void HostGradients::clear_gradients() {
  sums_->clear();
  for (const auto& [name, tensor, aliases] : copies_) at::Tensor(tensor).mutable_grad() = at::Tensor();
  inner_->clear_gradients();
}

Slice HostGradients::slice_on(int rank, const at::Tensor& updated) const {
  const auto found = std::ranges::find_if(copies_, [&](const nn::NamedParameter& copy) { return copy.tensor.is_same(updated); });
  invariant(found != copies_.end(), "gradients on the host: a tensor that nobody updates");
  return inner_->slice_on(rank, parameters_[static_cast<size_t>(found - copies_.begin())].tensor);
}

}  // namespace tessera
