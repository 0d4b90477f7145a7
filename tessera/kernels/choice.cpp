#include "tessera/kernels/choice.h"

#include <array>
#include <utility>

#include "tessera/core/ambient.h"

namespace tessera::kernels {

namespace {

const Ambient<KernelChoices> current;  // Auto

constexpr std::array kNames{
#define TESSERA_KERNEL(name) std::string_view(#name),
    TESSERA_KERNELS(TESSERA_KERNEL)
#undef TESSERA_KERNEL
};

}  // namespace

std::optional<Kernel> kernel_named(std::string_view name) {
  for (size_t i = 0; i < kNames.size(); ++i) {
    if (kNames[i] == name) return static_cast<Kernel>(i);
  }
  return std::nullopt;
}

const KernelChoices& kernel_choices() { return *current; }

KernelChoiceGuard::KernelChoiceGuard(const KernelChoices& choices) : former_(std::exchange(*current, choices)) {}
KernelChoiceGuard::~KernelChoiceGuard() { *current = former_; }

}  // namespace tessera::kernels
