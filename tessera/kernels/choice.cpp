#include "tessera/kernels/choice.h"

#include <utility>

#include "tessera/core/ambient.h"

namespace tessera::kernels {

namespace {
const Ambient<KernelChoice> current;  // Auto
}

KernelChoice kernel_choice() { return *current; }

KernelChoiceGuard::KernelChoiceGuard(KernelChoice choice) : former_(std::exchange(*current, choice)) {}
KernelChoiceGuard::~KernelChoiceGuard() { *current = former_; }

}  // namespace tessera::kernels
