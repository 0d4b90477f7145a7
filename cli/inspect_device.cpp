#include "cli/inspect_device.h"

#include <cstdio>
#include <memory>
#include <string>
#include <thread>

#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <nlohmann/json.hpp>
#include <torch/version.h>

#include "tessera/comm/backends/factory.h"
#include "tessera/core/devices.h"
#include "tessera/core/error.h"
#include "tessera/core/format.h"
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

std::string devices_table(const json& found) {
  const auto yes = [](const json& value) { return value.is_null() ? "?" : value.get<bool>() ? "yes" : "no"; };
  const auto bytes = [](const json& device, const char* key) {
    const auto number = device.value(key, int64_t{0});
    return number == 0 ? std::string() : format_bytes(number);
  };
  std::string out = fmt::format("{:<10} {:<32} {:>10} {:>10}  {:<6} {:<8} {}\n", "device", "model", "memory", "free", "bf16", "kernels", "reaches");
  for (const auto& device : found["devices"]) {
    const std::string model = device.contains("cores") ? fmt::format("{} cores", device["cores"].get<unsigned>()) : device.value("model", "");
    const auto peers = device.value("peers", std::vector<std::string>());
    out += fmt::format("{:<10} {:<32} {:>10} {:>10}  {:<6} {:<8} {}\n", device["name"].get<std::string>(), model, bytes(device, "memory_bytes"),
                       bytes(device, "free_bytes"), yes(device["bf16"]), yes(device["kernels"]), fmt::join(peers, " "));
  }
  const auto& cuda = found["cuda"];
  out += fmt::format("torch {}, {} CUDA; this build has {} for it\n", found["torch"].get<std::string>(), cuda["torch"].get<bool>() ? "with" : "without",
                     cuda["build"].get<bool>() ? "kernels" : "no kernels");
  out += fmt::format("engines: {}\n", fmt::join(found["engines"].get<std::vector<std::string>>(), ", "));
  out += fmt::format("run.device = auto: {}\n", found["auto"].get<std::string>());
  return out;
}

}  // namespace

void add_inspect_device(Command inspect, int& exit_code, const std::function<void()>& check) {
  auto as_json = std::make_shared<bool>(false);
  auto command = inspect.add_command("device", "Devices that this process sees, and what this build has for them");
  command.add_flag("--json", *as_json, "Print JSON");
  command.when_chosen([as_json, check, &exit_code] {
    check();
    const json found = describe();
    const std::string text = *as_json ? json_text(found) + "\n" : devices_table(found);
    std::fputs(text.c_str(), stdout);
    exit_code = 0;
  });
}

}  // namespace tessera::cli
