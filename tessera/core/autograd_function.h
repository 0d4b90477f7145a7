#pragma once

#include <optional>
#include <type_traits>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/util/FunctionRef.h>
#include <torch/csrc/autograd/custom_function.h>

namespace tessera {
namespace detail {

/// What autograd has to know of a call: its arguments that are tensors, and which they are of all arguments.
struct FunctionCall {
  using Backward = torch::autograd::variable_list (*)(torch::autograd::AutogradContext*, const torch::autograd::variable_list&);

  std::vector<at::Tensor> tensors;
  std::vector<bool> is_tensor;

  template <class Argument>
  void take(const Argument& argument) {
    if constexpr (std::is_same_v<Argument, at::Tensor>) {
      is_tensor.push_back(true);
      tensors.push_back(argument);
    } else if constexpr (std::is_same_v<Argument, std::optional<at::Tensor>>) {
      is_tensor.push_back(argument && argument->defined());
      if (is_tensor.back()) tensors.push_back(*argument);
    } else {
      static_assert(!std::is_convertible_v<Argument, at::TensorList>, "tensors are arguments one by one");
      is_tensor.push_back(false);
    }
  }
};

torch::autograd::variable_list apply_function(FunctionCall call, c10::function_ref<torch::autograd::variable_list(torch::autograd::AutogradContext*)> forward,
                                              FunctionCall::Backward backward);

}  // namespace detail

/// torch::autograd::Function, written and called as that one is, and compiled in a tenth of the time: all kinds of function share one kind of node, which
/// calls their `backward` by a pointer. libtorch's makes a node of each, with all that torch.compile could ask of it: 3.5 seconds in each file that has one.
/// An argument is a tensor, perhaps an optional one, or a value that has no gradient.
template <class T>
struct AutogradFunction {
  template <class... Args>
  static auto apply(const Args&... args) {
    using torch::autograd::variable_list;
    detail::FunctionCall call;
    (call.take(args), ...);
    using Result = decltype(T::forward(nullptr, args...));
    const auto forward = [&](torch::autograd::AutogradContext* context) -> variable_list {
      if constexpr (std::is_same_v<Result, variable_list>) {
        return T::forward(context, args...);
      } else {
        return {T::forward(context, args...)};
      }
    };
    auto results = detail::apply_function(std::move(call), forward, &T::backward);
    if constexpr (std::is_same_v<Result, variable_list>) {
      return results;
    } else {
      return at::Tensor(std::move(results.front()));
    }
  }
};

}  // namespace tessera
