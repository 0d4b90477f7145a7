#pragma once

#include <ATen/core/Tensor.h>

#include "tessera/pipeline/split/graph.h"
#include "tessera/pipeline/stage.h"

/// How a tensor travels, so that it arrives as it was: dimensions in the order in which they lie in memory, and those that an expanded view repeats once. Views
/// of both ends' tensors, with their gradients; kernels that take strides into account see the same ones. Memory with gaps travels without, and arrives
/// without.
namespace tessera::tape {

pipeline::TensorSpec wire_spec(const Form& form);
at::Tensor to_wire(const at::Tensor& tensor, const Form& form);
at::Tensor from_wire(const at::Tensor& wire, const Form& form);

}  // namespace tessera::tape
