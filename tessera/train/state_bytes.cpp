#include "tessera/train/state_bytes.h"

#include <c10/core/ScalarType.h>

#include "tessera/kernels/adam8bit.h"
#include "tessera/precision/policy.h"

namespace tessera {

BytesPerParameter bytes_per_parameter(const Config& config) {
  const auto policy = precision::policy_from(config.precision);
  const auto bytes = [](at::ScalarType dtype) { return static_cast<double>(c10::elementSize(dtype)); };
  const auto state_of = [&](double master) {  // of an element of a large matrix; Adafactor's sums of rows and columns are next to nothing
    const OptimConfig& optim = config.optim;
    const double average = optim.state_dtype == "bf16" ? bytes(at::kBFloat16) : master;
    if (optim.name == "adamw") return 2 * average;
    if (optim.name == "adam8bit") return 2 + 8.0 / kernels::kAdam8bitBlock;
    return optim.name == "lion" || optim.name == "muon" || optim.momentum > 0 ? average : 0;
  };
  return {.weight = bytes(policy.params),
          .gradient = bytes(policy.gradient_dtype().value_or(policy.params)),
          .state = state_of(bytes(policy.master)) + (policy.has_masters() ? bytes(policy.master) : 0)};
}

BytesPerParameter kept_per_parameter(const BytesPerParameter& whole, int stage, int ranks) {
  return {.weight = whole.weight / (stage >= 3 ? ranks : 1),
          .gradient = whole.gradient / (stage >= 2 ? ranks : 1),
          .state = whole.state / (stage >= 1 ? ranks : 1)};
}

BytesPerParameter beside_device_per_parameter(const Config& config, const BytesPerParameter& whole, int ranks) {
  const OffloadConfig& offload = config.offload;
  const auto kept = kept_per_parameter(whole, config.zero.stage, ranks);
  BytesPerParameter beside{.state = offload.optimizer.is("host") ? kept.state : 0};
  if (offload.params.is("host")) {
    beside.weight = kept.weight;
    beside.gradient = kept.gradient;
  } else if (!offload.optimizer.is("device") && offload.update == "host") {
    const int sharers = config.zero.stage >= 1 ? ranks : 1;  // of an update
    beside.weight = whole.weight / sharers;
    beside.gradient = offload.gradients.is("host") ? kept.gradient : whole.gradient / sharers;
  }
  return beside;
}

BytesPerParameter on_host_per_parameter(const Config& config, int ranks, bool on_cpu) {
  const auto whole = bytes_per_parameter(config);
  auto here = beside_device_per_parameter(config, whole, ranks);
  if (!on_cpu) return here;
  const OffloadConfig& offload = config.offload;
  const auto kept = kept_per_parameter(whole, config.zero.stage, ranks);
  if (offload.params.is("device")) here.weight += kept.weight;
  if (offload.gradients.is("device")) here.gradient += kept.gradient;
  if (offload.optimizer.is("device")) here.state += kept.state;
  return here;
}

}  // namespace tessera
