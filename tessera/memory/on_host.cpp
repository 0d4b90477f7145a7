#include "tessera/memory/on_host.h"

#include <utility>

#include "tessera/core/ambient.h"
#include "tessera/memory/memory_events.h"

namespace tessera {

namespace {
const Ambient<bool> stands_for_accelerator;
}

MetaAsAccelerator::MetaAsAccelerator() : former_(std::exchange(*stands_for_accelerator, true)) {}
MetaAsAccelerator::~MetaAsAccelerator() { *stands_for_accelerator = former_; }

bool is_on_host(const at::Tensor& tensor) {
  if (!tensor.is_meta()) return tensor.is_cpu();
  return !*stands_for_accelerator || storage_number(tensor).on_host;
}

}  // namespace tessera
