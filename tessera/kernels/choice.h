#pragma once

#include <bitset>
#include <optional>
#include <string_view>

#include "tessera/core/kernel_names.h"

namespace tessera::kernels {

/// The fused operators that have a plain twin.
enum class Kernel : unsigned char {
#define TESSERA_KERNEL(name) name,
  TESSERA_KERNELS(TESSERA_KERNEL)
#undef TESSERA_KERNEL
      count
};

/// Nothing where there is none of this name.
std::optional<Kernel> kernel_named(std::string_view name);

/// Which implementation a call of an operator takes.
///   Auto       the fused kernel of the tensor's device
///   Reference  the same operator as a plain composition of ATen operators, differentiated by autograd: slower and hungrier, and the oracle of the fused one
enum class KernelChoice : unsigned char { Auto, Reference };

/// A choice for each of them; all alike until set() says otherwise.
class KernelChoices {
 public:
  KernelChoices(KernelChoice all = KernelChoice::Auto) { plain_ = all == KernelChoice::Reference ? ~plain_ : plain_; }
  KernelChoices& set(Kernel kernel, KernelChoice choice) {
    plain_.set(static_cast<size_t>(kernel), choice == KernelChoice::Reference);
    return *this;
  }
  KernelChoice of(Kernel kernel) const { return plain_.test(static_cast<size_t>(kernel)) ? KernelChoice::Reference : KernelChoice::Auto; }
  bool operator==(const KernelChoices&) const = default;

 private:
  std::bitset<static_cast<size_t>(Kernel::count)> plain_;
};

/// This thread's choices; Auto unless a KernelChoiceGuard lives.
const KernelChoices& kernel_choices();
/// Of them that of one operator.
inline KernelChoice kernel_choice(Kernel kernel) { return kernel_choices().of(kernel); }
inline bool takes_reference(Kernel kernel) { return kernel_choice(kernel) == KernelChoice::Reference; }

/// Sets this thread's choices (`run.kernels`) and restores the former ones when destroyed.
/// A choice is made in the forward pass: a backward pass follows the forward that recorded it.
class KernelChoiceGuard {
 public:
  explicit KernelChoiceGuard(const KernelChoices& choices);
  ~KernelChoiceGuard();
  KernelChoiceGuard(const KernelChoiceGuard&) = delete;
  KernelChoiceGuard& operator=(const KernelChoiceGuard&) = delete;

 private:
  KernelChoices former_;
};

}  // namespace tessera::kernels
