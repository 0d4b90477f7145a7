#include "tessera/train/state_bytes.h"

#include <c10/core/ScalarType.h>

#include "tessera/kernels/adam8bit.h"
#include "tessera/precision/policy.h"
#include "tessera/train/places.h"

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

namespace {

/// The sum of what each share of the model's elements comes to.
template <class Of>
BytesPerParameter sum_of(const std::vector<PlacedShare>& shares, Of&& of) {
  BytesPerParameter sum;
  for (const PlacedShare& share : shares) {
    const BytesPerParameter one = of(share);
    sum.weight += share.share * one.weight;
    sum.gradient += share.share * one.gradient;
    sum.state += share.share * one.state;
  }
  return sum;
}

BytesPerParameter beside_device(const OffloadConfig& offload, const BytesPerParameter& whole, int stage, int ranks, const PlacedShare& share) {
  const auto kept = kept_per_parameter(whole, stage, ranks);
  BytesPerParameter beside{.state = share.optimizer == WaitingPlace::Host ? kept.state : 0};
  if (share.params == WaitingPlace::Host) {
    beside.weight = kept.weight;
    beside.gradient = kept.gradient;
  } else if (share.params == WaitingPlace::Device && share.optimizer != WaitingPlace::Device && offload.update == "host") {
    const int sharers = stage >= 1 ? ranks : 1;  // of an update
    beside.weight = whole.weight / sharers;
    beside.gradient = offload.gradients.is("host") ? kept.gradient : whole.gradient / sharers;
  }
  return beside;
}

}  // namespace

BytesPerParameter beside_device_per_parameter(const Config& config, const BytesPerParameter& whole, int ranks) {
  return sum_of(placed_shares(config), [&](const PlacedShare& share) { return beside_device(config.offload, whole, config.zero.stage, ranks, share); });
}

BytesPerParameter on_host_per_parameter(const Config& config, int ranks, bool on_cpu) {
  const auto whole = bytes_per_parameter(config);
  const auto kept = kept_per_parameter(whole, config.zero.stage, ranks);
  return sum_of(placed_shares(config), [&](const PlacedShare& share) {
    auto here = beside_device(config.offload, whole, config.zero.stage, ranks, share);
    if (!on_cpu) return here;
    const bool streamed = config.offload.params.is("device") && config.offload.gradients.is("host");
    if (share.params == WaitingPlace::Device) here.weight += kept.weight;
    if (share.params == WaitingPlace::Device && !streamed) here.gradient += kept.gradient;
    if (share.optimizer == WaitingPlace::Device) here.state += kept.state;
    return here;
  });
}

BytesPerParameter on_disk_per_parameter(const Config& config, int ranks) {
  const auto kept = kept_per_parameter(bytes_per_parameter(config), config.zero.stage, ranks);
  return sum_of(placed_shares(config), [&](const PlacedShare& share) {
    BytesPerParameter there{.state = share.optimizer == WaitingPlace::Disk ? kept.state : 0};
    if (share.params == WaitingPlace::Disk) there = {.weight = kept.weight, .gradient = kept.gradient, .state = there.state};
    return there;
  });
}

DiskTraffic disk_traffic_per_parameter(const Config& config, int ranks, int64_t micro_batches) {
  const auto there = on_disk_per_parameter(config, ranks);
  const auto passes = static_cast<double>(micro_batches), reductions = config.zero.accumulate == "whole" ? 1.0 : passes;
  const double gathers = (config.zero.reshard_after_forward ? 2 : 1) * passes, clips = config.optim.max_grad_norm > 0 ? 1 : 0;
  return {.write = there.state + there.weight + (reductions + clips) * there.gradient,
          .read = there.state + (gathers + 1) * there.weight + (reductions + clips + 1) * there.gradient};
}

}  // namespace tessera
