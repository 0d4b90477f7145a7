#pragma once

#include <optional>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

namespace tessera::tape {

/// Runs an operator whose tensors, on the stack from `first` on, are on meta. Where it has no kernel there, and under autocast, whose casts meta tensors pass
/// by unseen, it runs on zeros of the same shapes on the CPU (under CUDA's autocast, there), and what it gives is forgotten but for what it looks like. Throws
/// c10::NotImplementedError where that is no way, since the operator writes into what it takes.
void run_without_data(const c10::OperatorHandle& op, torch::jit::Stack& stack, size_t first);

/// The value with `change` made to each tensor in it.
template <class F>
c10::IValue for_tensors(const c10::IValue& value, F&& change) {
  if (value.isTensor()) return value.toTensor().defined() ? change(value.toTensor()) : value.toTensor();
  if (value.isTensorList()) {
    std::vector<at::Tensor> tensors = value.toTensorVector();
    for (at::Tensor& tensor : tensors) tensor = tensor.defined() ? change(tensor) : tensor;
    return tensors;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> tensors;
    for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector()) {
      tensors.push_back(tensor && tensor->defined() ? std::optional(change(*tensor)) : tensor);
    }
    return tensors;
  }
  return value;
}

}  // namespace tessera::tape
