#include "tessera/nn/write_watch.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/as_strided.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/ne.h>
#include <ATen/ops/tensor.h>

#include "tessera/comm/collectives.h"
#include "tessera/core/error.h"
#include "tessera/core/hash.h"
#include "tessera/core/host_read.h"
#include "tessera/core/log.h"
#include "tessera/nn/flat_gradients.h"
#include "tessera/nn/gradient_guard.h"
#include "tessera/nn/replicas.h"

// A tensor's version counter is the cheap sign of a write, and the whole tensor's hash would be the sure one, at the price of reading the model in each step.
// In between, for what goes past the counter: 16 elements spread over the tensor. An optimizer's step changes nearly all elements; a write that misses these 16
// is not noticed. Of what lies on a device the host reads none of them for itself: they are gathered there, at the mark and once more when it is asked, and one
// read says whether they are the same bytes. So it is asked only where the host waits for the device anyway.

namespace tessera::nn {

void GradientWrites::see(size_t index, const at::Tensor& gradient) {
  seen_[index] = gradient.defined() && !is_gradient_guard(gradient) ? Seen{.tensor = gradient.unsafeGetTensorImpl(), .version = gradient._version()} : Seen{};
}

bool GradientWrites::is(size_t index, const at::Tensor& gradient) const {
  const auto& [tensor, version] = seen_[index];
  return gradient.unsafeGetTensorImpl() == tensor && gradient._version() == version;
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

namespace {
bool is_on_device(const at::Tensor& tensor) { return !tensor.is_cpu() && !tensor.is_meta(); }
}  // namespace

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

/// In a few launches, however many parameters there are: what is taken of each is a view.
std::map<std::string, at::Tensor> ParameterWrites::device_samples_of(const std::vector<NamedParameter>& parameters) const {
  std::map<std::pair<std::string, at::ScalarType>, std::vector<at::Tensor>> views;
  for (const Mark& mark : marks_) {
    const at::Tensor tensor = parameters[mark.index].tensor.detach();
    if (!is_on_device(tensor) || tensor.numel() == 0 || !tensor.is_non_overlapping_and_dense()) continue;
    const int64_t count = std::min(tensor.numel(), kSamples), step = count > 1 ? (tensor.numel() - 1) / (count - 1) : 1;
    views[{tensor.device().str(), tensor.scalar_type()}].push_back(tensor.as_strided({count}, {step}, tensor.storage_offset()));
  }
  std::map<std::string, std::vector<at::Tensor>> bytes;
  for (const auto& [kind, of_kind] : views) bytes[kind.first].push_back(at::cat(of_kind).view(at::kByte));
  std::map<std::string, at::Tensor> samples;
  for (const auto& [device, of_device] : bytes) samples[device] = at::cat(of_device);
  return samples;
}

void ParameterWrites::mark(const std::vector<NamedParameter>& parameters, const std::vector<bool>& which) {
  if (!marks_.empty()) return;
  const at::NoGradGuard no_grad;
  for (size_t i = 0; i < parameters.size(); ++i) {
    if (which[i]) marks_.push_back({.index = i, .version = parameters[i].tensor._version(), .samples = samples_of(parameters[i].tensor)});
  }
  device_samples_ = device_samples_of(parameters);
}

bool ParameterWrites::changed(const std::vector<NamedParameter>& parameters) const {
  if (std::ranges::any_of(marks_, [&](const Mark& mark) { return samples_of(parameters[mark.index].tensor) != mark.samples; })) return true;
  if (device_samples_.empty()) return false;
  const at::NoGradGuard no_grad;
  const auto now = device_samples_of(parameters);
  return std::ranges::any_of(device_samples_, [&](const auto& marked) {
    const auto found = now.find(marked.first);
    return found == now.end() || found->second.sizes() != marked.second.sizes() || host_read(found->second.ne(marked.second).any(), 0) != 0;
  });
}

WriteCounts::Seen WriteCounts::of(const at::Tensor& parameter) {
  return {.version = parameter.is_inference() ? 0 : static_cast<int64_t>(parameter._version()),
          .memory = parameter.has_storage() ? parameter.storage().unsafeGetStorageImpl() : nullptr};
}

WriteCounts::WriteCounts(std::string technique, comm::Group replicas, comm::Group shard)
    : technique_(std::move(technique)), replicas_(std::move(replicas)), shard_(std::move(shard)) {}

uint64_t WriteCounts::take(std::vector<Seen> now) {
  Hasher hasher;
  hasher.update(&taken_, sizeof taken_);
  seen_.resize(now.size());
  for (size_t i = 0; i < now.size(); ++i) {
    const std::array<int64_t, 2> since{now[i].version - seen_[i].version, now[i].memory != seen_[i].memory ? 1 : 0};
    hasher.update(since.data(), sizeof since);
  }
  seen_ = std::move(now);
  return taken_ = hasher.value();
}

void WriteCounts::compare(const std::vector<NamedParameter>& parts, const std::string& reason) const {
  std::string found;
  try {
    compare_replicas(parts, replicas_, technique_, reason);
  } catch (const ConfigError& error) {
    found = error.what();
  }
  bool elsewhere = false;
  if (shard_.size() > 1 && !parts.empty()) {
    const at::NoGradGuard no_grad;
    const at::Tensor differs = at::tensor({found.empty() ? 0 : 1}, at::kLong).to(message_device(parts.front().tensor, shard_));
    comm::all_reduce(shard_, differs, comm::Op::Max);
    elsewhere = found.empty() && !parts.front().tensor.is_meta() && differs.cpu().item<int64_t>() != 0;
  }
  require(found.empty(), found);
  require(!elsewhere, technique_, ": the replicas differ in what another rank of ", shard_.name(), " holds, which names the parameter",
          reason.empty() ? "" : "; " + reason);
}

void WriteCounts::settle(bool unlike) {
  constexpr int kTold = 10;
  taken_ = 0;
  if (!unlike && unlike_in_a_row_ < kTold) unlike_in_a_row_ = 0;
  if (!unlike || ++unlike_in_a_row_ != kTold || replicas_.rank() + shard_.rank() > 0) return;
  log().warn(
      "{}: in each of the last {} steps some ranks wrote parameters more often than others, and all held the same then. If that is the program's way (each "
      "rank updates its share of the parameters and broadcasts it), wrap with ReplicaStart::Trust: until then every such step compares the replicas, by a "
      "hash of all parameters",
      technique_, kTold);
}

std::string ParameterWrites::first_written(const std::vector<NamedParameter>& parameters) const {
  for (const auto& [index, version, samples] : marks_) {
    const at::Tensor& tensor = parameters[index].tensor;
    if (tensor._version() != version || samples_of(tensor) != samples) return parameters[index].name;
  }
  return {};
}

}  // namespace tessera::nn
