#include "tessera/tensor_parallel/known_parts.h"

#include <algorithm>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/sum.h>
#include <ATen/ops/zeros.h>

#include "tessera/comm/collectives.h"
#include "tessera/comm/engine.h"
#include "tessera/core/error.h"
#include "tessera/core/host_read.h"
#include "tessera/nn/flat_gradients.h"
#include "tessera/nn/gradient_dispatcher.h"
#include "tessera/nn/gradient_synchronizer.h"
#include "tessera/nn/kept_memory.h"
#include "tessera/nn/sharing.h"

namespace tessera::tensor_parallel {

namespace {

/// libtorch's optimizers write behind the version counter, so it is values that tell.
at::Tensor sum_of(const at::Tensor& parameter) {
  const at::NoGradGuard no_grad;
  return parameter.detach().sum(at::kDouble);
}

/// Of data that a program has given all ranks: whether it may be one rank's, and two numbers of its values.
at::Tensor told_of(const at::Tensor& given) {
  const at::NoGradGuard no_grad;
  const at::Tensor flat = given.detach().reshape({-1});
  return at::stack({flat.ne(flat[0]).any().to(at::kDouble), flat.sum(at::kDouble), flat.abs().sum(at::kDouble)});  // zeros may be all ranks'
}

/// torch::save of one rank's cut model keeps its parts; torch::load of that file on every rank fits wherever cuts are even, and is another model.
void refuse_one_ranks_parts(const comm::Group& group, const std::vector<nn::NamedParameter>& parameters) {
  if (!group.engine()->moves_data() || group.size() == 1) return;
  std::vector<nn::NamedParameter> parts;
  std::vector<at::Tensor> told;
  for (const auto& parameter : parameters) {
    const auto sharings = nn::sharings_of(parameter.tensor);
    const bool is_part =
        std::ranges::any_of(sharings, [&](const nn::Sharing& one) { return one.axis == group.name() && one.sets == group.size() && one.even; });
    if (!is_part || !parameter.tensor.is_floating_point() || parameter.tensor.is_meta()) continue;
    const at::Tensor& part = parameter.tensor;
    const bool looks = nn::was_given(part) && part.numel() > 0;
    parts.push_back(parameter);
    told.push_back((looks ? told_of(part) : at::zeros({3}, part.options().dtype(at::kDouble).requires_grad(false))).to(message_device(part, group)));
  }
  if (parts.empty()) return;
  const at::Tensor own = at::stack(told), all = at::empty({group.size() * own.size(0), 3}, own.options());
  comm::all_gather(group, all, own);
  const std::vector<double> read = host_read_all(all, 0);
  for (size_t i = 0; i < parts.size(); ++i) {
    bool alike = read[3 * i] != 0;
    for (size_t other = 3 * (i + parts.size()); other < read.size(); other += 3 * parts.size()) {
      alike = alike && std::equal(&read[3 * i], &read[3 * i] + 3, &read[other]);
    }
    require(!alike, "parallelize_module: '", parts[i].name, "' was given the same values on every rank of ", group.name(),
            " after it was cut: a file that torch::save made of one rank's model holds that rank's parts, and so does a vector of its parameters; load by "
            "checkpoint::load, each rank what it saved itself, or the whole before parallelize_module");
  }
  for (const auto& part : parts) nn::forget_given(part.tensor);  // behind the last refusal: until other values are loaded, it is refused again
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
          " share out, was given data of another shape since, ", parameter.sizes(),
          " (set_data, torch::load of a model that was not cut), which is no part of it; "
          "load by checkpoint::load, or before parallelize_module");
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
    refuse_one_ranks_parts(group_, there);
  }
  return next(std::move(inputs));
}

}  // namespace tessera::tensor_parallel
