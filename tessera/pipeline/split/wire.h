#pragma once

#include <ATen/core/Tensor.h>

#include "tessera/pipeline/split/graph.h"
#include "tessera/pipeline/stage.h"

/// How a tensor travels, so that it arrives as it was: dimensions in the order in which they lie in memory, and those that an expanded view repeats once. Views
/// of both ends' tensors, with their gradients; kernels that take strides into account see the same ones. Memory with gaps travels without, and arrives
/// without, unless it is asked for `with_gaps`, which costs the memory of its gaps: what takes a copy of such a tensor (reshape, contiguous) would be given the
/// tensor itself, which matters where either is written into (storages_by_layout).
namespace tessera::tape {

pipeline::TensorSpec wire_spec(const Form& form);
at::Tensor to_wire(const at::Tensor& tensor, const Form& form);
at::Tensor from_wire(const at::Tensor& wire, const Form& form, bool with_gaps = true);

/// Whether the tensor, of the form's sizes and dtype, is one that can travel so: not with rows of its own where one was repeated.
bool fits_wire(const at::Tensor& tensor, const Form& form);

/// A copy that lies in memory as the tensor does.
at::Tensor copy_of(const at::Tensor& tensor);

}  // namespace tessera::tape
