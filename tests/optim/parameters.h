#pragma once

#include <string>
#include <vector>

#include <ATen/ops/randn.h>
#include <ATen/ops/zeros.h>

#include "tessera/nn/parameter.h"
#include "tests/plain_model.h"
#include "tests/test_device.h"

namespace tessera::optim {

/// Named parameters of these shapes with reproducible values (none on meta) and no gradients.
inline std::vector<nn::NamedParameter> make_parameters(const std::vector<std::vector<int64_t>>& shapes, at::Device device = testing_support::test_device()) {
  std::vector<nn::NamedParameter> parameters;
  at::manual_seed(7);
  for (size_t i = 0; i < shapes.size(); ++i) {
    const auto options = at::TensorOptions(device).dtype(at::kFloat);
    auto tensor = device.is_meta() ? at::empty(shapes[i], options) : at::randn(shapes[i], options);
    tensor.set_requires_grad(true);
    parameters.push_back({"p" + std::to_string(i), tensor, {}});
  }
  return parameters;
}

using testing_support::plain_model;

/// Gradients of step `step`, the same for every call with the same arguments.
inline void draw_gradients(const std::vector<nn::NamedParameter>& parameters, int step) {
  at::manual_seed(100 + step);
  for (const auto& parameter : parameters) {
    at::Tensor tensor = parameter.tensor;
    tensor.mutable_grad() = tensor.is_meta() ? at::empty_like(tensor) : at::randn(tensor.sizes(), tensor.options().requires_grad(false));
  }
}

}  // namespace tessera::optim
