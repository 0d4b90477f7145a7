#pragma once

namespace tessera::kernels {

/// Which implementation this thread's calls of tessera::kernels take.
///   Auto       the fused kernel of the tensor's device
///   Reference  the same operator as a plain composition of ATen operators, differentiated by autograd: slower and hungrier, and the oracle of the fused one
enum class KernelChoice { Auto, Reference };

/// This thread's choice; Auto unless a KernelChoiceGuard lives.
KernelChoice kernel_choice();

/// Sets this thread's choice (`run.kernels`) and restores the former one when destroyed.
/// The choice is made in the forward pass: a backward pass follows the forward that recorded it.
class KernelChoiceGuard {
 public:
  explicit KernelChoiceGuard(KernelChoice choice);
  ~KernelChoiceGuard();
  KernelChoiceGuard(const KernelChoiceGuard&) = delete;
  KernelChoiceGuard& operator=(const KernelChoiceGuard&) = delete;

 private:
  KernelChoice former_;
};

}  // namespace tessera::kernels
