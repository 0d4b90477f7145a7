#include "tessera/train/state_bytes.h"

#include <tuple>

#include <c10/core/ScalarType.h>

#include "tessera/config/optim_groups.h"
#include "tessera/kernels/adam8bit.h"
#include "tessera/mesh/roles.h"
#include "tessera/models/flops.h"
#include "tessera/precision/policy.h"
#include "tessera/train/places.h"

namespace tessera {

namespace {

/// Of one that is trained.
BytesPerParameter bytes_of_trained(const Config& config, const OptimConfig& optim) {
  const auto policy = precision::policy_from(config.precision);
  const auto bytes = [](at::ScalarType dtype) { return static_cast<double>(c10::elementSize(dtype)); };
  const auto state_of = [&](double master) {  // of an element of a large matrix; Adafactor's sums of rows and columns are next to nothing
    const double average = optim.state_dtype == "bf16" ? bytes(at::kBFloat16) : master;
    if (optim.name == "adamw") return 2 * average;
    if (optim.name == "adam8bit") return 2 + 8.0 / kernels::kAdam8bitBlock;
    return optim.name == "lion" || optim.name == "muon" || momentum_of(optim) > 0 ? average : 0;
  };
  return {.weight = bytes(policy.params),
          .gradient = bytes(policy.gradient_dtype().value_or(policy.params)),
          .state = state_of(bytes(policy.master)) + (policy.has_masters() ? bytes(policy.master) : 0)};
}

}  // namespace

BytesPerParameter bytes_of(const PlacedElements& kind, const Config& config) {
  const auto trained = bytes_of_trained(config, kind.optim);
  return kind.trained ? trained : BytesPerParameter{.weight = trained.weight};
}

namespace {

/// Kinds of elements as shares of the parameters that the model's shape has, and so the bytes of weights in fewer bits. `experts`: whether they are told apart.
CountedElements shares_of(const Config& config, bool experts = false) {
  const auto& [params, optimizer] = std::tie(config.offload.params, config.offload.optimizer);
  const bool whole = config.lora.modules.empty() && config.quantize.modules.empty() && config.optim.groups.empty() && config.optim.name != "muon" &&
                     config.optim.name != "adam8bit";                                    // which leave some of them to AdamW
  if (whole && !experts && params.by_pattern.empty() && optimizer.by_pattern.empty()) {  // all alike, and nothing has to be laid out
    return {
        .elements = {
            {.params = place_of("offload.params", params, {}), .optimizer = place_of("offload.optimizer", optimizer, {}), .optim = config.optim, .count = 1}}};
  }
  CountedElements shares = count_elements(config);
  const auto parameters = static_cast<double>(num_parameters(config.model));
  for (PlacedElements& kind : shares.elements) kind.count /= parameters;
  shares.quantized_bytes /= parameters;
  return shares;
}

/// The sum of what each share of the model's elements comes to.
template <class Of>
BytesPerParameter sum_of(const CountedElements& shares, Of&& of) {
  BytesPerParameter sum;
  for (const PlacedElements& kind : shares.elements) {
    const BytesPerParameter one = of(kind);
    sum.weight += kind.count * one.weight;
    sum.gradient += kind.count * one.gradient;
    sum.state += kind.count * one.state;
  }
  return sum;
}

CountedElements shares_of(const Config& config, const Sharers& sharers) { return shares_of(config, sharers.experts != 1); }

/// Of `kind`; `whole`: where nothing is sharded.
BytesPerParameter kept_of(const PlacedElements& kind, const BytesPerParameter& whole, int stage, const Sharers& sharers) {
  return kept_per_parameter(whole, stage, sharers.ranks, kind.expert ? sharers.experts : 1);
}

BytesPerParameter beside_device(const OffloadConfig& offload, const BytesPerParameter& whole, int stage, const Sharers& sharers, const PlacedElements& kind) {
  const auto kept = kept_of(kind, whole, stage, sharers);
  BytesPerParameter beside{.state = kind.optimizer == WaitingPlace::Host ? kept.state : 0};
  if (kind.params == WaitingPlace::Host) {
    beside.weight = kept.weight;
    beside.gradient = kept.gradient;
  } else if (kind.params == WaitingPlace::Device && kind.optimizer != WaitingPlace::Device && offload.update == "host") {
    const auto updated = kept_of(kind, whole, stage >= 1 ? 3 : 0, sharers);
    beside.weight = updated.weight;
    beside.gradient = offload.gradients.is("host") ? kept.gradient : updated.gradient;
  }
  return beside;
}

BytesPerParameter on_disk(const BytesPerParameter& whole, int stage, const Sharers& sharers, const PlacedElements& kind) {
  const auto kept = kept_of(kind, whole, stage, sharers);
  BytesPerParameter there{.state = kind.optimizer == WaitingPlace::Disk ? kept.state : 0};
  if (kind.params == WaitingPlace::Disk) there = {.weight = kept.weight, .gradient = kept.gradient, .state = there.state};
  return there;
}

}  // namespace

BytesPerParameter bytes_per_parameter(const Config& config) {
  const CountedElements shares = shares_of(config);
  BytesPerParameter mean = sum_of(shares, [&](const PlacedElements& kind) { return bytes_of(kind, config); });
  mean.quantized = shares.quantized_bytes;
  return mean;
}

double trained_share(const Config& config) {
  if (config.lora.modules.empty()) return 1;
  double share = 0;
  for (const PlacedElements& kind : shares_of(config).elements) share += kind.trained ? kind.count : 0;
  return share;
}

Sharers sharers(const Config& config, const MeshShape& shape) {
  const MeshRoles roles = mesh_roles(config);
  const int apart = config.mesh.ep * config.mesh.expert_tp;
  return {size_along(shape, roles.shard), deals_experts(config, shape) ? static_cast<double>(size_along(shape, roles.layers)) / apart : 1};
}

BytesPerParameter kept_per_parameter(const BytesPerParameter& whole, int stage, int ranks, double part) {
  const auto held = [&](double bytes, int sharded_from) { return stage >= sharded_from ? bytes / ranks : bytes * part; };
  return {.weight = held(whole.weight, 3), .gradient = held(whole.gradient, 2), .state = held(whole.state, 1), .quantized = held(whole.quantized, 3)};
}

BytesPerParameter beside_device_per_parameter(const Config& config, const Sharers& sharers) {
  return sum_of(shares_of(config, sharers),
                [&](const PlacedElements& kind) { return beside_device(config.offload, bytes_of(kind, config), config.zero.stage, sharers, kind); });
}

BytesPerParameter on_host_per_parameter(const Config& config, const Sharers& sharers, bool on_cpu) {
  const CountedElements shares = shares_of(config, sharers);
  const bool streamed = config.offload.params.is("device") && config.offload.gradients.is("host");
  BytesPerParameter mean = sum_of(shares, [&](const PlacedElements& kind) {
    const auto whole = bytes_of(kind, config);
    auto here = beside_device(config.offload, whole, config.zero.stage, sharers, kind);
    if (!on_cpu) return here;
    const auto kept = kept_of(kind, whole, config.zero.stage, sharers);
    if (kind.params == WaitingPlace::Device) here.weight += kept.weight;
    if (kind.params == WaitingPlace::Device && !streamed) here.gradient += kept.gradient;
    if (kind.optimizer == WaitingPlace::Device) here.state += kept.state;
    return here;
  });
  if (on_cpu) mean.quantized = kept_per_parameter({.quantized = shares.quantized_bytes}, config.zero.stage, sharers.ranks).quantized;
  return mean;
}

BytesPerParameter on_disk_per_parameter(const Config& config, const Sharers& sharers) {
  return sum_of(shares_of(config, sharers), [&](const PlacedElements& kind) { return on_disk(bytes_of(kind, config), config.zero.stage, sharers, kind); });
}

DiskTraffic disk_traffic_per_parameter(const Config& config, const Sharers& sharers, int64_t micro_batches) {
  const auto passes = static_cast<double>(micro_batches), reductions = config.zero.accumulate == "whole" ? 1.0 : passes;
  const double gathers = (config.zero.reshard_after_forward ? 2 : 1) * passes, clips = config.optim.max_grad_norm > 0 ? 1 : 0;
  DiskTraffic traffic;
  for (const PlacedElements& kind : shares_of(config, sharers).elements) {
    const auto there = on_disk(bytes_of(kind, config), config.zero.stage, sharers, kind);
    const double updates = kind.trained ? 1 : 0;
    traffic.write += kind.count * (there.state + updates * there.weight + (reductions + clips) * there.gradient);
    traffic.read += kind.count * (there.state + (gathers + updates) * there.weight + (reductions + clips + 1) * there.gradient);
  }
  return traffic;
}

}  // namespace tessera
