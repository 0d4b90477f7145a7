#include "tessera/offload/host_gradients.h"

#include <utility>

#include <c10/core/GradMode.h>

#include "tessera/memory/memory.h"
#include "tessera/nn/gradient_dispatcher.h"
#include "tessera/nn/names.h"

// A gradient is taken from its parameter as soon as backward has accumulated it, so the next micro-batch's begins anew and is added on the host: the same terms
// in the same order as in grad(), and so the same bits. The device's memory of it is free when its copy is made; how many may wait for that is bounded by
// landing the oldest.

namespace tessera {

HostGradients::HostGradients(std::unique_ptr<GradientSynchronizer> inner, const std::vector<nn::NamedParameter>& updated, at::Device device,
                             int64_t in_flight_bytes)
    : inner_(std::move(inner)), link_(device), in_flight_bytes_(in_flight_bytes), parameters_(updated) {
  const c10::NoGradGuard no_grad;
  const MemoryScope scope(MemoryCategory::Parameters);
  const HostMemory beside;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    const auto& [name, tensor, aliases] = parameters_[i];
    const at::Tensor copy = link_.empty(tensor.numel(), tensor.scalar_type()).view(tensor.sizes()).detach();
    copy.set_requires_grad(tensor.requires_grad());
    nn::set_slice(copy, nn::slice_of(tensor));
    nn::set_updated_for(copy, nn::updated_for(tensor));
    copies_.push_back({name, copy, aliases});
    versions_.emplace_back();
    if (!tensor.requires_grad()) continue;
    hooks_.add(nn::GradientDispatcher::of(tensor).listen([this, i](const at::Tensor&) { send(i); }));
  }
  follow();
}

HostGradients::~HostGradients() = default;

void HostGradients::follow() {
  const c10::NoGradGuard no_grad;
  returned_.wait();
  for (size_t i = 0; i < parameters_.size(); ++i) take(i);
}

void HostGradients::take(size_t index) {
  copies_[index].tensor.copy_(parameters_[index].tensor);
  versions_[index] = {parameters_[index].tensor._version(), copies_[index].tensor._version()};
}

void HostGradients::begin_step() {
  const c10::NoGradGuard no_grad;
  while (!flights_.empty()) land();  // of a step that failed
  clear_gradients();
  for (size_t i = 0; i < parameters_.size(); ++i) {
    if (parameters_[i].tensor._version() == versions_[i].parameter) continue;
    returned_.wait();
    take(i);
  }
  inner_->begin_step();
}

void HostGradients::send(size_t index) {
  const c10::NoGradGuard no_grad;
  const at::Tensor gradient = std::exchange(parameters_[index].tensor.mutable_grad(), at::Tensor());
  if (!gradient.defined()) return;
  const auto bytes = static_cast<int64_t>(gradient.nbytes());
  while (!flights_.empty() && flying_bytes_ + bytes > in_flight_bytes_) land();
  const MemoryScope scope(MemoryCategory::Gradients);
  Flight flight{.index = index, .gradient = link_.empty(gradient.numel(), gradient.scalar_type()).view(gradient.sizes()), .arrived = {}};
  {
    const CopyStream::Scope copying(link_.out);
    flight.gradient.copy_(gradient, /*non_blocking=*/true);
    keep_until_used(gradient);
    flight.arrived = link_.out.point();
  }
  flying_bytes_ += bytes;
  flights_.push_back(std::move(flight));
}

/// The oldest arrives, and is added to what came of earlier micro-batches.
void HostGradients::land() {
  const Flight flight = std::move(flights_.front());
  flights_.pop_front();
  flying_bytes_ -= static_cast<int64_t>(flight.gradient.nbytes());
  flight.arrived.wait();
  const at::Tensor& copy = copies_[flight.index].tensor;
  copy.grad().defined() ? static_cast<void>(copy.mutable_grad().add_(flight.gradient)) : static_cast<void>(copy.mutable_grad() = flight.gradient);
}

void HostGradients::finish() {
  const c10::NoGradGuard no_grad;
  inner_->finish();
  for (size_t i = 0; i < parameters_.size(); ++i) send(i);  // those that were reduced over ranks
  while (!flights_.empty()) land();
  returned_.wait();
}

void HostGradients::after_update() {
  const c10::NoGradGuard no_grad;
  {
    const CopyStream::Scope copying(link_.in);
    for (size_t i = 0; i < parameters_.size(); ++i) {
      const auto& [name, copy, aliases] = copies_[i];
      // What nobody updates may follow another's update (an embedding's second end on one rank); libtorch's SGD writes behind the version counter.
      if (!copy.grad().defined() && copy._version() == versions_[i].copy) continue;
      at::Tensor(parameters_[i].tensor).copy_(copy, /*non_blocking=*/true);
      versions_[i] = {parameters_[i].tensor._version(), copy._version()};
    }
    returned_ = link_.in.point();
  }
  returned_.hold_device();
  inner_->after_update();
}

void HostGradients::clear_gradients() {
  for (const auto& [name, tensor, aliases] : copies_) at::Tensor(tensor).mutable_grad() = at::Tensor();
  inner_->clear_gradients();
}

}  // namespace tessera
