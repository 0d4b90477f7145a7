#pragma once

#include <ATen/core/Tensor.h>

namespace tessera::kernels {

/// A 16-bit parameter in the wider `dtype`, itself where it has that type. The gradient that comes is handed on as it is, where autograd's own cast would round
/// it to 16 bits first: what the parameter takes it up in is for its grad_dtype() to say (its own type, unless set_grad_dtype was told another). So gradients
/// of micro-batches are summed as they were computed.
at::Tensor widen(const at::Tensor& parameter, at::ScalarType dtype);

/// In which type a gradient that was computed in `computed` is best handed on to `parameter`: a leaf may take it up in another type than its own.
at::ScalarType handed_on_in(const at::Tensor& parameter, at::ScalarType computed);

}  // namespace tessera::kernels
