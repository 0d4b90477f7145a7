#include "tessera/offload/host_optimizer.h"

#include <algorithm>
#include <functional>
#include <utility>

#include <ATen/Parallel.h>
#include <c10/core/GradMode.h>

#include "tessera/core/error.h"
#include "tessera/core/hash_tensor.h"
#include "tessera/kernels/choice.h"
#include "tessera/kernels/fp32_products.h"
#include "tessera/memory/memory.h"
#include "tessera/nn/late_updates.h"
#include "tessera/nn/names.h"

// Where the three streams meet: a gradient leaves behind what the device was asked for (its reduction, clipping, parameters that come back); the host waits for
// it before it reads it, or writes the copy of its parameter; parameters come back behind what was asked for, too, for they were read until now.

namespace tessera {

namespace {
bool is_among(const std::vector<size_t>& indices, size_t index) { return std::ranges::find(indices, index) != indices.end(); }
}  // namespace

HostOptimizer::HostOptimizer(const std::vector<nn::NamedParameter>& parameters, at::Device device, const Build& build, int64_t piece_bytes, bool delayed)
    : Optimizer(std::vector{optim::ParameterGroup{parameters}}), link_(device), piece_bytes_(piece_bytes), delayed_(delayed) {
  const c10::NoGradGuard no_grad;
  const MemoryScope scope(MemoryCategory::Optimizer);
  const HostMemory beside;
  std::vector<nn::NamedParameter> copies;
  for (const auto& [name, tensor, aliases] : parameters_) {
    const at::Tensor copy = link_.empty(tensor.numel(), tensor.scalar_type()).view(tensor.sizes()).detach();
    copy.copy_(tensor);
    copy.set_requires_grad(tensor.requires_grad());  // what says whether the optimizer inside keeps state of it from the start
    nn::set_slice(copy, nn::slice_of(tensor));
    beside_.push_back({.copy = copy});
    copies.push_back({name, copy, aliases});
  }
  inner_ = build(copies);
}

std::vector<optim::StateTensor> HostOptimizer::state() const {
  const HostMemory beside;
  await_update();
  return with_next(inner_->state(), loading_);
}

std::vector<optim::StateTensor> HostOptimizer::state_to_save() const {
  await_update();
  return with_next(inner_->state_to_save(), {});
}

/// A delayed update is one ahead of the weights: also of what was frozen since. Of what has none under way the copy is what the parameter is by now. What is
/// being loaded is left as it is, and so is what was written beside its update, which the load replaces.
std::vector<optim::StateTensor> HostOptimizer::with_next(std::vector<optim::StateTensor> state, const std::vector<size_t>& loading) const {
  for (size_t i = 0; delayed_ && i < parameters_.size(); ++i) {
    const bool is_loaded = is_among(loading, i), is_ahead = is_among(ahead_, i);
    if (!parameters_[i].tensor.requires_grad() && !is_ahead && !is_loaded) continue;
    if (!is_loaded) is_ahead ? refuse_written(i) : follow(i);
    state.push_back({parameters_[i].name, std::string(optim::kNextState), beside_[i].copy.detach(), nn::slice_of(parameters_[i].tensor)});
  }
  return state;
}

void HostOptimizer::follow_all_but(const std::set<std::string>& ahead) {
  const c10::NoGradGuard no_grad;
  await_update();
  end_loading();
  const auto is_ahead = [&](size_t i) { return ahead.contains(parameters_[i].name); };
  std::erase_if(ahead_, std::not_fn(is_ahead));
  for (size_t i = 0; i < parameters_.size(); ++i) {
    if (!is_ahead(i)) beside_[i].copy.copy_(parameters_[i].tensor);
  }
  for (const size_t i : ahead_) mark(i);
}

void HostOptimizer::hold_state(const std::map<std::string, int64_t>& counts) {
  const HostMemory beside;
  await_update();
  inner_->hold_state(counts);
  loading_.clear();
  for (size_t i = 0; delayed_ && i < parameters_.size(); ++i) {
    if (!counts.contains(parameters_[i].name)) continue;
    if (!is_among(ahead_, i)) follow(i);
    loading_.push_back(i);
  }
}

/// Something was loaded. What hold_state() has named may be one update ahead from now on, and not before: where what was to come is refused, all is as it was.
void HostOptimizer::end_loading() {
  for (const size_t i : std::exchange(loading_, {})) {
    if (!is_among(ahead_, i)) ahead_.push_back(i);
  }
  // Of the update that was under way, which a step without a gradient of its own would make once more.
  for (auto& own : beside_) own.copy.mutable_grad() = at::Tensor();
}

void HostOptimizer::counts_changed() {
  await_update();
  end_loading();
  // Of a delayed run that is taken up every copy may be ahead; follow_all_but() will tell.
  if (delayed_ && ahead_.empty()) {
    for (size_t i = 0; i < parameters_.size(); ++i) ahead_.push_back(i);
  }
  for (auto& own : beside_) own.writes = {};  // what was loaded is no write beside an update
  inner_->set_update_counts(update_counts());
}

/// Masters made for what is unfrozen are wider than what stood for them (precision/master_weights.h), of which the optimizer inside has no state yet.
void HostOptimizer::take_type(size_t index) {
  const at::Tensor& parameter = parameters_[index].tensor;
  Beside& own = beside_[index];
  if (own.copy.scalar_type() == parameter.scalar_type()) return;
  const c10::NoGradGuard no_grad;
  const MemoryScope scope(MemoryCategory::Optimizer);
  own.copy.set_data(link_.empty(parameter.numel(), parameter.scalar_type()).view(parameter.sizes()));
  nn::set_slice(own.copy, nn::slice_of(parameter));
  own.writes = {};
}

void HostOptimizer::follow(size_t index) const {
  const c10::NoGradGuard no_grad;
  const at::Tensor& parameter = parameters_[index].tensor;
  const Beside& own = beside_[index];
  if (own.writes != nn::WriteMark(parameter)) own.copy.copy_(parameter);
}

/// The copy would overwrite what was written. A version alone says little: sharding counts them where it shows a part, and writes back what was there.
void HostOptimizer::refuse_written(size_t index) const {
  const auto& [name, parameter, aliases] = parameters_[index];
  const Beside& own = beside_[index];
  if (link_.device.is_meta() || own.writes == nn::WriteMark() || own.writes == nn::WriteMark(parameter)) return;
  require(hash_of_values(parameter) == own.values, "HostOptimizer, delayed: '", name,
          "' was written since the last step (in place, set_data, torch::load), and the update that is made meanwhile began with what it was before, and would "
          "overwrite it; write weights before the first step, load a checkpoint with this optimizer, or make it without `delayed` (offload.delayed_update = "
          "false), which follows");
}

/// Of one that is loaded ahead: what is written from here on is refused.
void HostOptimizer::mark(size_t index) {
  Beside& own = beside_[index];
  own.writes = nn::WriteMark(parameters_[index].tensor);
  if (!link_.device.is_meta()) own.values = hash_of_values(parameters_[index].tensor);
}

void HostOptimizer::send_gradient(size_t index, const at::Tensor& gradient) {
  Beside& own = beside_[index];
  own.gradient = link_.empty(gradient.numel(), gradient.scalar_type()).view(gradient.sizes());
  const CopyStream::Scope copying(link_.out);
  own.gradient.copy_(gradient, /*non_blocking=*/true);
  keep_until_used(gradient);
  own.arrived = link_.out.point();
}

void HostOptimizer::prepare(const std::vector<Batch>& batches) {
  const HostMemory beside;
  loading_.clear();
  show_update();
  {
    const MemoryScope scope(MemoryCategory::Gradients);
    for (const Batch& batch : batches) {
      for (size_t i = 0; i < batch.indices.size(); ++i) send_gradient(batch.indices[i], batch.gradients[i]);
    }
  }
  for (const Batch& batch : batches) {
    for (const size_t index : batch.indices) take_type(index);
    for (const size_t index : batch.indices) follow(index);
  }
  if (!inner_->needs_begin()) return;
  for (const Batch& batch : batches) {
    for (const size_t index : batch.indices) {
      beside_[index].arrived.wait();
      beside_[index].copy.mutable_grad() = beside_[index].gradient;
    }
  }
  inner_->begin(batches.front().lr);
  for (const Batch& batch : batches) {
    for (const size_t index : batch.indices) beside_[index].copy.mutable_grad() = at::Tensor();
  }
}

/// Of the step before, to whoever computes from here on.
void HostOptimizer::show_update() {
  await_update();
  if (ahead_.empty()) return;
  for (const size_t index : ahead_) refuse_written(index);
  {
    const CopyStream::Scope copying(link_.in);
    for (const size_t index : ahead_) {
      Beside& own = beside_[index];
      own.copy.mutable_grad() = at::Tensor();
      at::Tensor(parameters_[index].tensor).copy_(own.copy, /*non_blocking=*/true);
      own.writes = nn::WriteMark(parameters_[index].tensor);
      nn::note_late_update(parameters_[index].tensor);
    }
  }
  ahead_.clear();
  end_return();
}

/// Who computes from here on has what was copied back; so do gradients on their way out, and the host, which waits for those before it writes a copy again.
void HostOptimizer::end_return() { link_.in.point().hold_device(); }

void HostOptimizer::await_update() const {
  if (under_way_.valid()) under_way_.get();
}

/// Gradients and copies are the thread's until it is awaited. Of a step that is made some parameters at a time, each part waits for the one before.
void HostOptimizer::update_later(const Batch& batch) {
  await_update();
  for (const size_t index : ahead_) beside_[index].copy.mutable_grad() = at::Tensor();
  std::vector<CopyStream::Point> arriving;
  for (const size_t index : batch.indices) {
    Beside& own = beside_[index];
    own.copy.mutable_grad() = std::exchange(own.gradient, {});
    arriving.push_back(own.arrived);
    own.writes = nn::WriteMark(parameters_[index].tensor);
  }
  ahead_.insert(ahead_.end(), batch.indices.begin(), batch.indices.end());
  const auto make = [this, begun = batch.indices, terms = optim::UpdateTerms{.lr = batch.lr, .gradient_scale = batch.gradient_scale}, arriving] {
    const c10::NoGradGuard no_grad;
    for (const CopyStream::Point& point : arriving) point.wait();
    for (const size_t index : begun) {
      Beside& own = beside_[index];
      if (!own.copy.is_meta()) own.values = hash_of_values(own.copy);
    }
    inner_->apply(terms);
  };
  if (link_.device.is_meta()) return make();
  under_way_ = std::async(std::launch::async, [make, context = MemoryContext::current(), threads = at::get_num_threads(), kernels = kernels::kernel_choices(),
                                               fast = kernels::FastProducts::are_wanted()] {
    at::set_num_threads(threads);
    const MemoryContext::Guard memory(context);
    const kernels::KernelChoiceGuard choice(kernels);
    const kernels::FastProducts products(fast);  // an optimizer inside that is paged multiplies here (Muon)
    make();
  });
}

void HostOptimizer::update(const Batch& batch) {
  const HostMemory beside;
  if (delayed_) return update_later(batch);
  for (size_t begin = 0; begin < batch.indices.size();) {
    const size_t end = batch.piece_end(begin, piece_bytes_);
    for (size_t i = begin; i < end; ++i) {
      Beside& own = beside_[batch.indices[i]];
      own.arrived.wait();
      own.copy.mutable_grad() = std::exchange(own.gradient, {});
    }
    inner_->apply({.lr = batch.lr, .skip = batch.skip, .gradient_scale = batch.gradient_scale});  // parameters without a gradient, all others, are left alone
    const CopyStream::Scope copying(link_.in);
    for (size_t i = begin; i < end; ++i) {
      Beside& own = beside_[batch.indices[i]];
      own.copy.mutable_grad() = at::Tensor();
      batch.parameters[i].copy_(own.copy, /*non_blocking=*/true);
      own.writes = nn::WriteMark(parameters_[batch.indices[i]].tensor);
    }
    begin = end;
  }
  end_return();
}

}  // namespace tessera
