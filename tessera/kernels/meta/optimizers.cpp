#include <ATen/core/stack.h>

#include "tessera/kernels/meta/registration.h"

namespace tessera::kernels::meta {

namespace {

/// Fused steps work in place, allocate nothing and return nothing.
void in_place(const c10::OperatorHandle& op, torch::jit::Stack* stack) { torch::jit::drop(*stack, op.schema().arguments().size()); }

}  // namespace

TORCH_LIBRARY_IMPL(aten, Meta, m) {
  for (const char* name : {"_fused_adamw_", "_fused_adamw_.tensor_lr", "_fused_adam_", "_fused_adam_.tensor_lr", "_fused_sgd_", "_fused_sgd_.tensor_lr",
                           "_fused_adagrad_", "_fused_adagrad_.tensor_lr", "_amp_foreach_non_finite_check_and_unscale_"}) {
    implement(m, name, torch::CppFunction::makeFromBoxedFunction<in_place>());
  }
}

}  // namespace tessera::kernels::meta
