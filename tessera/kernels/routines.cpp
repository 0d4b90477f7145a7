#include "tessera/kernels/routines.h"

#include <array>

#include "tessera/core/error.h"

namespace tessera::kernels {

namespace {

// A plain array: filled while static objects are made, read-only afterwards.
std::array<const Routines*, c10::COMPILE_TIME_MAX_DEVICE_TYPES>& table() {
  static std::array<const Routines*, c10::COMPILE_TIME_MAX_DEVICE_TYPES> routines{};
  return routines;
}

}  // namespace

void register_routines(c10::DeviceType device, const Routines& routines) { table()[static_cast<size_t>(device)] = &routines; }

bool has_routines(c10::DeviceType device) { return table()[static_cast<size_t>(device)] != nullptr; }

const Routines& routines_for(const at::Tensor& tensor) {
  const Routines* routines = table()[static_cast<size_t>(tensor.device().type())];
  require(routines != nullptr, "kernels: no fused kernels for device ", tensor.device().str(), "; set run.kernels = \"reference\"");
  return *routines;
}

bool (*device_multiplies_bf16(c10::DeviceType device))(c10::DeviceIndex) {
  const Routines* routines = table()[static_cast<size_t>(device)];
  return routines ? routines->multiplies_bf16 : nullptr;
}

}  // namespace tessera::kernels
