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
#include "tessera/core/hash_tensor.h"
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

/// What ranks tell each other of a part: of what kind it is, and its bits where it was given. A constant, such as zeros, may be all ranks'.
constexpr double kConstant = 0, kOwn = 1, kGiven = 2;
constexpr int64_t kTold = 2;

at::Tensor told_of(const at::Tensor& part) {
  const at::NoGradGuard no_grad;
  const at::Tensor values = part.detach().to(at::kCPU).contiguous();
  const bool varies = values.numel() > 0 && values.ne(values.flatten()[0]).any().item<bool>();
  const double kind = !varies ? kConstant : nn::was_given(part) ? kGiven : kOwn;
  constexpr int exact = 11;  // bits of a hash that a double has no room for
  return at::tensor({kind, kind == kGiven ? static_cast<double>(hash_of_values(values) >> exact) : 0.0}, at::kDouble);
}

/// torch::save of one rank's cut model keeps its parts; torch::load of that file on every rank fits wherever cuts are even, and is another model. Such a file
/// replaces all parts: where one of them differs between ranks, or was not given, those that are alike may be so on purpose (experts that begin as one layer).
void refuse_one_ranks_parts(const comm::Group& group, const std::vector<nn::NamedParameter>& parameters) {
  if (!group.engine()->moves_data() || group.size() == 1) return;
  std::vector<nn::NamedParameter> parts;
  for (const auto& parameter : parameters) {
    const auto sharings = nn::sharings_of(parameter.tensor);
    const bool is_part =
        std::ranges::any_of(sharings, [&](const nn::Sharing& one) { return one.axis == group.name() && one.sets == group.size() && one.even; });
    if (is_part && parameter.tensor.is_floating_point() && !parameter.tensor.is_meta()) parts.push_back(parameter);
  }
  if (parts.empty()) return;
  const bool was_given = std::ranges::any_of(parts, [](const auto& part) { return nn::was_given(part.tensor); });
  std::vector<at::Tensor> told;
  for (const auto& part : parts) told.push_back(was_given ? told_of(part.tensor) : at::zeros({kTold}, at::kDouble));
  const at::Tensor own = at::stack(told).to(message_device(parts.front().tensor, group)), all = at::empty({group.size() * own.size(0), kTold}, own.options());
  comm::all_gather(group, all, own);
  const std::vector<double> read = host_read_all(all, 0);
  const auto of_rank = static_cast<std::ptrdiff_t>(own.numel());
  bool alike = false;
  for (auto at = read.begin(); at != read.end(); at += kTold) alike = alike || *at == kGiven;
  for (auto at = read.begin(); at != read.end(); at += kTold) alike = alike && *at != kOwn;
  for (auto rank = read.begin(); rank != read.end(); rank += of_rank) alike = alike && std::equal(rank, rank + of_rank, read.begin());
  const auto first = std::ranges::find_if(parts, [](const auto& part) { return nn::was_given(part.tensor); });
  require(!alike, "parallelize_module: '", first == parts.end() ? parts.front().name : first->name,
          "' and all other parts have the same values on every rank of ", group.name(),
          ", and were given since they were cut: a file that torch::save made of one rank's model holds that rank's parts, and so does a vector of "
          "its parameters; load by checkpoint::load, each rank what it saved itself, or the whole before parallelize_module");
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
