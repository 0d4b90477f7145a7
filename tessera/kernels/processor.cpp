#include "tessera/kernels/processor.h"

#include <ATen/cpu/Utils.h>

namespace tessera::kernels {

bool processor_has(const char* capability) {
  static const auto capabilities = at::cpu::get_cpu_capabilities();
  const auto found = capabilities.find(capability);
  return found != capabilities.end() && found->second.isBool() && found->second.toBool();
}

}  // namespace tessera::kernels
