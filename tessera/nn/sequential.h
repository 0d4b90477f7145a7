#pragma once

#include <functional>
#include <memory>
#include <string>
#include <type_traits>
#include <vector>

#include "tessera/nn/module.h"

namespace tessera::nn {

/// Modules one after the other, each tensor -> tensor, as torch::nn::Sequential, but calls of our modules pass their interceptors. Takes holders of ours,
/// plain torch::nn modules, and functions without parameters: `Sequential(Linear(4, 8), at::relu, Linear(8, 2))`. Children are named
/// "0", "1", ... by their place.
class SequentialImpl : public Module {
 public:
  SequentialImpl() = default;
  template <class First, class... Rest, class = std::enable_if_t<!std::is_base_of_v<SequentialImpl, std::remove_cvref_t<First>>>>
  explicit SequentialImpl(First first, Rest... rest) {
    push_back(std::move(first));
    (push_back(std::move(rest)), ...);
  }

  /// Adds a holder, or a function at::Tensor(const at::Tensor&).
  template <class M>
  void push_back(M step) {
    if constexpr (requires { step.ptr(); }) {
      register_module(std::to_string(steps_.size()), step.ptr());
      steps_.push_back([step](const at::Tensor& x) mutable -> at::Tensor { return step(x); });
    } else {
      steps_.push_back(std::function<at::Tensor(const at::Tensor&)>(std::move(step)));
    }
  }

  at::Tensor forward(const at::Tensor& x);
  size_t size() const { return steps_.size(); }

 private:
  std::vector<std::function<at::Tensor(const at::Tensor&)>> steps_;
};
TESSERA_MODULE(Sequential);

}  // namespace tessera::nn
