#include "tessera/nn/write_watch.h"

#include <algorithm>
#include <cstring>

#include <ATen/core/grad_mode.h>

#include "tessera/core/error.h"
#include "tessera/nn/gradient_guard.h"

// A tensor's version counter is the cheap sign of a write, and the whole tensor's hash would be the sure one, at the price of reading the model in each step.
// In between, for what goes past the counter: 16 elements spread over the tensor. An optimizer's step changes nearly all elements; a write that misses these 16
// is not noticed.

namespace tessera::nn {

void GradientWrites::see(size_t index, const at::Tensor& gradient) {
  seen_[index] = gradient.defined() ? Seen{.tensor = gradient.unsafeGetTensorImpl(), .version = gradient._version()} : Seen{};
}

bool GradientWrites::written(size_t index, const at::Tensor& gradient) const {
  const auto& [tensor, version] = seen_[index];
  if (tensor == nullptr || !gradient.defined() || is_gradient_guard(gradient)) return false;
  return gradient.unsafeGetTensorImpl() != tensor || gradient._version() != version;
}

bool GradientWrites::zeroed(size_t index, const at::Tensor& gradient) const {
  if (!written(index, gradient) || gradient.is_meta()) return false;
  const at::NoGradGuard no_grad;
  return !gradient.any().item<bool>();
}

bool GradientWrites::cleared(size_t index, const NamedParameter& parameter, const std::string& technique) const {
  const at::Tensor& gradient = parameter.tensor.grad();
  if (!gradient.defined() || is_cleared(gradient)) return true;
  if (!written(index, gradient)) return false;
  require(zeroed(index, gradient), technique, ": the gradient of '", parameter.name,
          "' was changed within an accumulation, after a pass under no_sync(): that would change this rank's part of the newest passes alone; change it when a "
          "pass without no_sync() has completed it");
  return true;
}

ParameterForms::ParameterForms(const std::vector<NamedParameter>& parameters) {
  for (const auto& [name, tensor, aliases] : parameters) forms_.push_back({tensor.sizes().vec(), tensor.scalar_type(), tensor.device()});
}

void ParameterForms::require_same(const std::string& technique, size_t index, const NamedParameter& parameter) const {
  const auto& [name, tensor, aliases] = parameter;
  const Form& form = forms_[index];
  require(tensor.sizes() == form.sizes && tensor.scalar_type() == form.dtype && tensor.device() == form.device, technique, ": '", name,
          "' was given values of shape ", tensor.sizes(), ", ", tensor.scalar_type(), " on ", tensor.device(),
          " (torch::load, set_data, Module::to), and is wrapped in another form, ", at::IntArrayRef(form.sizes), ", ", form.dtype, " on ", form.device,
          "; change a model's form before it is wrapped");
}

void ParameterForms::require_same(const std::string& technique, const std::vector<NamedParameter>& parameters) const {
  for (size_t i = 0; i < parameters.size(); ++i) require_same(technique, i, parameters[i]);
}

std::array<uint64_t, ParameterWrites::kSamples> ParameterWrites::samples_of(const at::Tensor& tensor) {
  std::array<uint64_t, kSamples> samples{};
  if (!tensor.is_cpu() || tensor.numel() == 0 || !tensor.is_non_overlapping_and_dense()) return samples;
  const auto* const bytes = static_cast<const char*>(tensor.const_data_ptr());
  const auto width = static_cast<int64_t>(tensor.element_size());
  for (int64_t i = 0; i < kSamples; ++i) {
    const int64_t element = i * (tensor.numel() - 1) / (kSamples - 1);
    std::memcpy(&samples[static_cast<size_t>(i)], bytes + element * width, std::min<size_t>(width, sizeof(uint64_t)));
  }
  return samples;
}

void ParameterWrites::mark(const std::vector<NamedParameter>& parameters, const std::vector<bool>& which) {
  if (!marks_.empty()) return;
  for (size_t i = 0; i < parameters.size(); ++i) {
    if (which[i]) marks_.push_back({.index = i, .version = parameters[i].tensor._version(), .samples = samples_of(parameters[i].tensor)});
  }
}

std::string ParameterWrites::first_written(const std::vector<NamedParameter>& parameters) const {
  for (const auto& [index, version, samples] : marks_) {
    const at::Tensor& tensor = parameters[index].tensor;
    if (tensor._version() != version || samples_of(tensor) != samples) return parameters[index].name;
  }
  return {};
}

}  // namespace tessera::nn
