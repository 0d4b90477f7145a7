#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

namespace tessera::tape {

/// Runs an operator whose tensors, on the stack from `first` on, are on meta. Where it has no kernel there, and under autocast, whose casts meta tensors pass
/// by unseen, it runs on zeros of the same shapes on the CPU (under CUDA's autocast, there), and what it gives is forgotten but for what it looks like. Throws
/// c10::NotImplementedError where that is no way, since the operator writes into what it takes.
void run_without_data(const c10::OperatorHandle& op, torch::jit::Stack& stack, size_t first);

}  // namespace tessera::tape
