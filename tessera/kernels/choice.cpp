#include "tessera/kernels/choice.h"

#include <utility>

namespace tessera::kernels {

namespace {
thread_local KernelChoice current = KernelChoice::Auto;
}

KernelChoice kernel_choice() { return current; }

KernelChoiceGuard::KernelChoiceGuard(KernelChoice choice) : former_(std::exchange(current, choice)) {}
KernelChoiceGuard::~KernelChoiceGuard() { current = former_; }

}  // namespace tessera::kernels
