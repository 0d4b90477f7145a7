#pragma once

#include <functional>
#include <memory>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>
#include <torch/optim/adam.h>
#include <torch/optim/optimizer.h>
#include <torch/optim/sgd.h>

/// What loops of plain libtorch are compared with, under whatever wrapper: optimizers with state, and the weights that they leave.
namespace tessera::testing_support {

using MakeOptimizer = std::function<std::unique_ptr<torch::optim::Optimizer>(const std::vector<at::Tensor>&)>;

inline std::unique_ptr<torch::optim::Optimizer> make_sgd(const std::vector<at::Tensor>& parameters) {
  return std::make_unique<torch::optim::SGD>(parameters, torch::optim::SGDOptions(0.05).momentum(0.9));
}

inline std::unique_ptr<torch::optim::Optimizer> make_adam(const std::vector<at::Tensor>& parameters) {
  return std::make_unique<torch::optim::Adam>(parameters, torch::optim::AdamOptions(1e-2));
}

inline std::vector<at::Tensor> weights_of(const torch::nn::Module& module) {
  std::vector<at::Tensor> weights;
  for (const at::Tensor& parameter : module.parameters()) weights.push_back(parameter.detach().clone());
  return weights;
}

}  // namespace tessera::testing_support
