#include "tessera/plan/machine.h"

#include <algorithm>
#include <cmath>
#include <string>

namespace tessera::plan {
namespace {

LinkRates link_rates(const std::optional<Link>& link, double otherwise, double share, double latency) {
  return {.bandwidth = (link ? link->bytes_per_s : otherwise) * share,
          .latency = latency,
          .hop = link ? link->latency_s.value_or(0) : 0,
          .contention = link ? link->contention : 0};
}

}  // namespace

const OperatorHabit* Habits::of(const std::string& name) const {
  const auto found = std::ranges::find_if(operators, [&](const OperatorHabit& habit) { return name.starts_with(habit.name); });
  return found == operators.end() ? nullptr : &*found;
}

Machine machine_of(const Device& device) {
  // Power goes with the clock and the square of the voltage, which the clock needs in proportion. What long products reach is what heats a device.
  const double clock = device.held_to_w ? std::cbrt(*device.held_to_w / *device.power_w) : 1;
  const DeviceRates usual;
  const auto reached = [&](const std::string& what, double otherwise) {
    const auto found = device.reaches.find(what);
    return found == device.reaches.end() ? otherwise : found->second;
  };
  const HostSide host = device.host.value_or(HostSide{.bytes_per_s = 31.5e9, .memory_bytes_per_s = 25e9 * device.devices_per_node});
  Machine machine{.device = {.product_share = clock * reached("products", usual.product_share),
                             .attention_share = clock * reached("attention", usual.attention_share),
                             .memory_bandwidth = device.memory_bytes_per_s,
                             .memory_share = reached("memory", usual.memory_share),
                             .multiprocessors = static_cast<int>(reached("multiprocessors", usual.multiprocessors)),
                             .kernel_gap = reached("gap_us", usual.kernel_gap * 1e6) * 1e-6,
                             .launch = reached("launch_us", usual.launch * 1e6) * 1e-6,
                             .collective_launch = reached("collective_launch_us", usual.collective_launch * 1e6) * 1e-6,
                             .host_link = host.bytes_per_s * reached("host", 0.8),
                             .host_memory = host.memory_bytes_per_s * reached("host_memory", 0.8) / device.devices_per_node},
                  .devices_per_host = device.devices_per_node,
                  .inside = link_rates(device.inside, device.memory_bytes_per_s / 4, reached("inside", 0.8), reached("inside_us", 10) * 1e-6),
                  .across = link_rates(device.between, 12.5e9, reached("between", 0.9), reached("between_us", 40) * 1e-6)};
  const std::map<std::string, c10::ScalarType> types{{"fp32", at::kFloat}, {"fp16", at::kHalf}, {"bf16", at::kBFloat16}, {"fp8", at::kFloat8_e4m3fn}};
  for (const auto& [name, type] : types) {
    if (const auto rate = device.flops_per_s.find(name); rate != device.flops_per_s.end()) machine.device.flops[type] = rate->second;
  }
  return machine;
}

}  // namespace tessera::plan
