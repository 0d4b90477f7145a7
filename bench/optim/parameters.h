#pragma once

#include <string>
#include <vector>

#include <ATen/ops/randn.h>

#include "tessera/nn/parameter.h"

namespace tessera::bench {

/// Of a LLaMA of 35 million, with gradients; bench/peers/optimizers.py has the same.
inline std::vector<nn::NamedParameter> parameters_of_llama(at::ScalarType dtype = at::kFloat) {
  std::vector<std::vector<int64_t>> shapes{{32000, 384}, {32000, 384}, {384}};
  for (int layer = 0; layer < 6; ++layer) {
    for (int i = 0; i < 4; ++i) shapes.push_back({384, 384});
    for (int i = 0; i < 2; ++i) shapes.push_back({1024, 384});
    shapes.insert(shapes.end(), {{384, 1024}, {384}, {384}});
  }
  std::vector<nn::NamedParameter> parameters;
  for (const auto& shape : shapes) {
    auto tensor = at::randn(shape).to(dtype).set_requires_grad(true);
    tensor.mutable_grad() = at::randn(shape).to(dtype);
    const std::string name = "p" + std::to_string(parameters.size());
    nn::set_slice(tensor, Slice::whole(name, shape));
    parameters.push_back({name, tensor, {}});
  }
  return parameters;
}

inline int64_t count(const std::vector<nn::NamedParameter>& parameters) {
  int64_t elements = 0;
  for (const auto& parameter : parameters) elements += parameter.tensor.numel();
  return elements;
}

}  // namespace tessera::bench
