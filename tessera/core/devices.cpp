#include "tessera/core/devices.h"

#include <array>
#include <atomic>
#include <charconv>
#include <optional>
#include <string_view>

#include <c10/core/Allocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include "tessera/core/error.h"

namespace tessera {

namespace {

std::array<std::atomic<bool>, c10::COMPILE_TIME_MAX_DEVICE_TYPES>& supported() {
  static std::array<std::atomic<bool>, c10::COMPILE_TIME_MAX_DEVICE_TYPES> types{};
  return types;
}

using Facts = DeviceFacts (*)(at::Device device);
using BusId = std::string (*)(at::Device device);

/// Who tells it, by type.
template <typename Teller>
std::atomic<Teller>& teller(at::DeviceType type) {
  static std::array<std::atomic<Teller>, c10::COMPILE_TIME_MAX_DEVICE_TYPES> tellers{};
  return tellers[static_cast<size_t>(type)];
}

/// What a name says. `index` only where it says one.
struct Wanted {
  at::DeviceType type = at::kCPU;
  bool automatic = false;
  std::optional<int> index{};
};

constexpr std::string_view kCuda = "cuda";

std::optional<Wanted> read(std::string_view name) {
  if (name == "auto") return Wanted{.type = at::kCUDA, .automatic = true};
  if (name == "cpu") return Wanted{};
  if (name == kCuda) return Wanted{.type = at::kCUDA};
  if (!name.starts_with("cuda:")) return std::nullopt;
  const std::string_view digits = name.substr(kCuda.size() + 1);
  int index = 0;
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), index);
  const bool plain = error == std::errc() && end == digits.data() + digits.size() && index >= 0 && std::to_string(index) == digits;
  return plain ? std::optional(Wanted{.type = at::kCUDA, .index = index}) : std::nullopt;
}

std::string counted(int number, const std::string& noun) { return detail::concat(number, " ", noun, number == 1 ? "" : "s"); }

}  // namespace

int num_devices(at::DeviceType type) {
  if (type == at::kCPU || type == at::kMeta) return 1;
  return c10::impl::hasDeviceGuardImpl(type) ? c10::impl::getDeviceGuardImpl(type)->deviceCount() : 0;
}

bool supports_device(at::DeviceType type) { return type == at::kCPU || type == at::kMeta || supported()[static_cast<size_t>(type)]; }

void add_supported_device(at::DeviceType type) { supported()[static_cast<size_t>(type)] = true; }

DeviceFacts device_facts(at::Device device) {
  if (const Facts facts = teller<Facts>(device.type())) return facts(device);
  DeviceFacts facts;
  auto* const allocator = dynamic_cast<c10::DeviceAllocator*>(c10::GetAllocator(device.type()));
  if (allocator == nullptr || !device.has_index()) return facts;
  try {
    const auto [free, total] = allocator->getMemoryInfo(device.index());
    facts.memory_bytes = static_cast<int64_t>(total);
    facts.free_bytes = static_cast<int64_t>(free);
  } catch (const c10::Error&) {  // of an allocator that does not say
  }
  return facts;
}

std::string device_bus_id(at::Device device) {
  const BusId bus_id = teller<BusId>(device.type());
  return bus_id ? bus_id(device) : std::string();
}

void add_device_facts(at::DeviceType type, Facts facts, BusId bus_id) {
  teller<Facts>(type) = facts;
  teller<BusId>(type) = bus_id;
}

void check_device_name(const std::string& wanted, const std::string& key) {
  require(read(wanted).has_value(), key, " = ", wanted, ": there is no such device; set it to auto, cpu, cuda or cuda:N (N from 0)");
}

at::Device resolve_device(const std::string& wanted, LocalRank local, const std::string& key) {
  check_device_name(wanted, key);
  const auto [type, automatic, index] = *read(wanted);
  const std::string knob = key + " = " + wanted, or_cpu = "or set " + key + " = cpu";
  const int devices = num_devices(type);
  if (type == at::kCPU || (automatic && (devices == 0 || !supports_device(type)))) return at::kCPU;
  require(c10::impl::hasDeviceGuardImpl(type), knob, ": this torch has no CUDA; build against one that has (tools/setup --cuda, make cuda), ", or_cpu);
  require(supports_device(type), knob, ": this build of tessera has no CUDA kernels; build the preset cuda (make cuda), ", or_cpu);
  require(devices > 0, knob, ": this process sees no CUDA device; look at what nvidia-smi and CUDA_VISIBLE_DEVICES say, ", or_cpu);
  if (index) {
    require(*index < devices, knob, ": this process sees ", counted(devices, "CUDA device"),
            devices == 1 ? ", cuda:0" : detail::concat(", cuda:0 to cuda:", devices - 1), "; name one of them, or set ", key, " = cuda");
    return {type, static_cast<c10::DeviceIndex>(*index)};
  }
  require(local.ranks <= devices, knob, ": ", counted(local.ranks, "rank"), " of this host see ", counted(devices, "CUDA device"), "; start ", devices,
          " on a host, set ", key, " = cuda:0 where each sees one of its own or all are to share one, ", or_cpu);
  return {type, static_cast<c10::DeviceIndex>(local.rank)};
}

}  // namespace tessera
