#include "tessera/tensor_parallel/known_parts.h"

#include <algorithm>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/sum.h>

#include "tessera/core/error.h"
#include "tessera/nn/gradient_dispatcher.h"
#include "tessera/nn/gradient_synchronizer.h"
#include "tessera/nn/sharing.h"

namespace tessera::tensor_parallel {

namespace {

/// libtorch's optimizers write behind the version counter, so it is values that tell.
at::Tensor sum_of(const at::Tensor& parameter) {
  const at::NoGradGuard no_grad;
  return parameter.detach().sum(at::kDouble);
}

/// A pass that is recorded for its shapes has no values, and answers questions about them.
bool is_recorded(const nn::Values& inputs) {
  return std::ranges::any_of(inputs, [](const c10::IValue& in) { return in.isTensor() && in.toTensor().is_meta(); });
}

}  // namespace

KnownParts::KnownParts(std::string axis, const std::vector<at::Tensor>& parameters, bool watches_terms)
    : axis_(std::move(axis)), watches_terms_(watches_terms) {
  for (const at::Tensor& parameter : parameters) parts_.push_back({nn::slice_of(parameter).name, WeakTensor(parameter.getIntrusivePtr())});
}

nn::Values KnownParts::call(nn::Module& /*module*/, nn::Values inputs, const nn::Next& next) {
  const bool recorded = is_recorded(inputs);
  for (Part& part : parts_) {
    auto impl = part.tensor.lock();
    if (!impl) continue;
    const at::Tensor parameter(std::move(impl));
    check_known(part.name, parameter);
    if (watches_terms_ && !part.is_looked_after && at::GradMode::is_enabled() && !recorded) look_after_term(part, parameter);
  }
  return next(std::move(inputs));
}

void KnownParts::check_known(const std::string& name, const at::Tensor& parameter) const {
  require(nn::is_shared_over(parameter, axis_), "parallelize_module: '", name, "', which ranks of ", axis_,
          " share out, was given other data since (Module::to, set_data, torch::load), and what it is a part of went with the data it had; change the dtype "
          "before parallelize_module, or by tessera::precision::apply(*model, {.params = ..., .compute = ...}) before materialize");
}

void KnownParts::look_after_term(Part& part, const at::Tensor& parameter) const {
  if (parameter.is_meta() || !parameter.is_leaf() || !parameter.requires_grad()) return;
  const GradientSynchronizer* const owner = nn::owner_of(parameter);
  const bool is_sharded = owner != nullptr && !owner->held_elements(0).empty();
  part.is_looked_after = is_sharded || !nn::axis_of_unsummed_term(parameter);
  if (part.is_looked_after) return part.listening.detach();
  if (!part.at_gradient) {
    part.at_gradient = std::make_shared<at::Tensor>();
    part.listening = nn::GradientDispatcher::of(parameter).listen([sum = part.at_gradient](const at::Tensor& own) { *sum = sum_of(own); });
  }
  require(!part.at_gradient->defined() || part.at_gradient->equal(sum_of(parameter)), "parallelize_module: '", part.name, "' was updated, each rank of '",
          axis_,
          "' has a term of its gradient, and they were never summed, so ranks drift apart: behind each backward pass, "
          "before clipping and the update, call nn::sum_terms(parallel->group(), wrapper.updated()), or, without a wrapper, of nn::unique_parameters(*model)");
}

WholeParts::WholeParts(comm::Group group, const std::vector<nn::NamedParameter>& parameters) : group_(std::move(group)) {
  for (const auto& parameter : parameters) parts_.emplace_back(parameter.name, parameter.tensor.getIntrusivePtr());
}

nn::Values WholeParts::call(nn::Module& module, nn::Values inputs, const nn::Next& next) {
  const bool is_pass = at::GradMode::is_enabled() && !is_recorded(inputs);
  if (is_pass && first_ == nullptr) first_ = &module;
  if (is_pass && first_ == &module && nn::is_due(++passes_)) {
    std::vector<nn::NamedParameter> there;
    for (const auto& [name, tensor] : parts_) {
      auto impl = tensor.lock();
      if (!impl) continue;
      const at::Tensor parameter(std::move(impl));
      if (!nn::keeps_memory(parameter)) there.push_back({name, parameter, {}});
    }
    nn::require_alike(group_, there);
  }
  return next(std::move(inputs));
}

}  // namespace tessera::tensor_parallel
