#pragma once

#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

namespace tessera::nn {

/// What `module` itself computes with: its own parameters, and the weight of a layer that was tied by `second->weight = first->weight`, which leaves what is
/// registered as it was.
std::vector<at::Tensor> weights_in_use(const torch::nn::Module& module);

}  // namespace tessera::nn
