#pragma once

#include <vector>

#include <ATen/core/Tensor.h>

namespace tessera {

/// For the end of a torch::autograd::Function's backward that autograd cannot see into: `gradients` as they are. Where they may be differentiated once more
/// (create_graph), they are tensors whose own backward throws ConfigError, naming `operation` and the `way_out`: without a history they would count as
/// constants, and what is differentiated would be wrong in silence. `received`: what backward was called with.
std::vector<at::Tensor> once_differentiable(const char* operation, const char* way_out, const std::vector<at::Tensor>& received,
                                            std::vector<at::Tensor> gradients);

}  // namespace tessera
