#include "tessera/nn/flat_gradients.h"

#include <algorithm>

#include <ATen/ATen.h>

#include "tessera/comm/collectives.h"
#include "tessera/core/error.h"
#include "tessera/nn/gradient_dispatcher.h"

namespace tessera {

std::vector<nn::NamedParameter> trainable_parameters(const torch::nn::Module& module) {
  std::vector<nn::NamedParameter> parameters = nn::unique_parameters(module);
  std::erase_if(parameters, [](const nn::NamedParameter& parameter) { return !parameter.tensor.requires_grad(); });
  require(!parameters.empty(), "data parallelism: module '", module.name(), "' has no parameter that requires a gradient; there is nothing to keep equal");
  return parameters;
}

at::Tensor gradient_view(const at::Tensor& flat, int64_t offset, const at::Tensor& parameter) {
  const at::Tensor piece = flat.narrow(0, offset, parameter.numel());
  if (!parameter.is_non_overlapping_and_dense()) return piece.view(parameter.sizes());
  return piece.as_strided(parameter.sizes(), parameter.strides(), piece.storage_offset());
}

void set_gradient(const at::Tensor& parameter, const at::Tensor& view) { parameter.mutable_grad() = view; }

bool occupies(const at::Tensor& gradient, const at::Tensor& view) {
  return gradient.defined() && gradient.is_alias_of(view) && gradient.scalar_type() == view.scalar_type() &&
         gradient.storage_offset() == view.storage_offset() && gradient.sizes() == view.sizes() && gradient.strides() == view.strides();
}

bool is_place_awaited(const at::Tensor& parameter, const at::Tensor& view) {
  return nn::GradientDispatcher::of(parameter).is_place_taken() && !occupies(parameter.grad(), view);
}

void recover_gradient(const at::Tensor& parameter, const at::Tensor& view) {
  const at::Tensor& gradient = parameter.grad();
  if (gradient.is_same(view)) return;
  const at::NoGradGuard no_grad;
  at::Tensor target = view;
  if (!gradient.defined()) {
    target.zero_();
  } else if (!occupies(gradient, view)) {
    target.copy_(gradient);
  }
  set_gradient(parameter, view);
}

void release_scratch(at::Tensor& scratch) {
  scratch.storage().unsafeGetStorageImpl()->reset();
  scratch.reset();
}

at::Device message_device(const at::Tensor& parameter) { return parameter.is_meta() ? at::Device(at::kCPU) : parameter.device(); }

UsedParameters::UsedParameters(const std::vector<nn::NamedParameter>& parameters) : parameters_(parameters), used_(parameters.size(), 0) {}

void UsedParameters::clear() { std::ranges::fill(used_, 0); }

bool UsedParameters::all() const { return std::ranges::find(used_, 0) == used_.end(); }

void UsedParameters::refuse_unused(const comm::Group& group) const {
  if (all()) return;
  constexpr int max_named = 10;
  std::string names;
  int count = 0;
  for (size_t i = 0; i < used_.size(); ++i) {
    if (used_[i]) continue;
    if (count < max_named) names += (count ? ", '" : "'") + parameters_[i].name + "'";
    ++count;
  }
  if (count > max_named) names += detail::concat(" and ", count - max_named, " more");
  throw ConfigError(detail::concat("data parallelism: on rank ", group.rank(), " of ", group.name(), ", ", count, " of ", used_.size(),
                                   " parameters got no gradient in this step: ", names,
                                   "; use them in the loss, set requires_grad to false before wrapping, or set find_unused_parameters in the options of the "
                                   "wrapper (no key of a configuration: the models of the command use all of theirs)"));
}

std::vector<bool> UsedParameters::anywhere(const comm::Group& group) const {
  at::Tensor used = at::tensor(used_, at::kInt).to(message_device(parameters_.front().tensor));
  comm::all_reduce(group, used, comm::Op::Max);
  used = used.cpu();
  const int32_t* words = used.const_data_ptr<int32_t>();
  return std::vector<bool>(words, words + used.numel());
}

}  // namespace tessera
