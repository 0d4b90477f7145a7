#include "cli/inspect_device.h"

#include <cstdio>
#include <memory>
#include <string>
#include <thread>

#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <nlohmann/json.hpp>
#include <torch/version.h>

#include "cli/inspect_text.h"
#include "tessera/comm/backends/factory.h"
#include "tessera/core/devices.h"
#include "tessera/core/error.h"
#include "tessera/core/json_text.h"
#include "tessera/kernels/products.h"
#include "tessera/kernels/routines.h"
#include "tessera/memory/host_memory.h"

namespace tessera::cli {

namespace {

using json = nlohmann::json;

/// Of types that this torch may have; those that it has none of show no devices.
constexpr at::DeviceType kAccelerators[] = {at::kCUDA, at::kXPU, at::kPrivateUse1};

json cpu_json() {
  return {{"name", "cpu"},
          {"cores", std::thread::hardware_concurrency()},
          {"memory_bytes", host_memory_bytes()},
          {"bf16", kernels::multiplies_bf16(at::kCPU)},
          {"kernels", kernels::has_routines(at::kCPU)},
          {"supported", true}};
}

json accelerator_json(at::Device device) {
  const DeviceFacts facts = device_facts(device);
  json peers = json::array();
  for (const int peer : facts.peers) peers.push_back(at::Device(device.type(), static_cast<c10::DeviceIndex>(peer)).str());
  const bool has_kernels = kernels::has_routines(device.type());
  return {{"name", device.str()},
          {"model", facts.model},
          {"capability", facts.capability},
          {"bus_id", device_bus_id(device)},
          {"memory_bytes", facts.memory_bytes},
          {"free_bytes", facts.free_bytes},
          {"bf16", has_kernels ? json(kernels::multiplies_bf16(device)) : json()},
          {"peers", peers},
          {"kernels", has_kernels},
          {"supported", supports_device(device.type())}};
}

json describe() {
  json devices = json::array({cpu_json()});
  for (const at::DeviceType type : kAccelerators) {
    for (int index = 0; index < num_devices(type); ++index) devices.push_back(accelerator_json({type, static_cast<c10::DeviceIndex>(index)}));
  }
  json cuda{{"torch", c10::impl::hasDeviceGuardImpl(at::kCUDA)}, {"build", kernels::has_routines(at::kCUDA)}};
  return {{"devices", devices}, {"auto", resolve_device("auto").str()}, {"torch", TORCH_VERSION}, {"cuda", cuda}, {"engines", comm::engine_names()}};
}

}  // namespace

void add_inspect_device(Command inspect, int& exit_code, const std::function<void()>& check) {
  auto as_json = std::make_shared<bool>(false);
  auto command = inspect.add_command("device", "Devices that this process sees, and what this build has for them");
  command.add_flag("--json", *as_json, "Print JSON");
  command.when_chosen([as_json, check, &exit_code] {
    check();
    const json found = describe();
    const std::string text = *as_json ? json_text(found) + "\n" : devices_text(found);
    std::fputs(text.c_str(), stdout);
    exit_code = 0;
  });
}

}  // namespace tessera::cli
