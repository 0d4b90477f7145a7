#pragma once

#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include "tessera/core/error.h"
#include "tessera/core/once_differentiable.h"

/// Shared by the operator files of this folder.
namespace tessera::kernels {

/// The registered operator `name`, typed; look it up once, into a static.
template <class Signature>
c10::TypedOperatorHandle<Signature> find_operator(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

inline bool is_supported(at::ScalarType type) { return type == at::kFloat || type == at::kBFloat16; }

inline void require_supported(const char* name, const at::Tensor& tensor) {
  require(is_supported(tensor.scalar_type()), name, ": dtype ", c10::toString(tensor.scalar_type()),
          " has no fused kernel; use Float, BFloat16, or run.kernels = \"reference\" (in C++ kernels::KernelChoiceGuard(KernelChoice::Reference))");
}

/// What a fused backward returns (core/once_differentiable.h): the reference is made of operators that autograd knows.
inline std::vector<at::Tensor> first_derivative(const char* name, const std::vector<at::Tensor>& received, std::vector<at::Tensor> gradients) {
  return once_differentiable(name, "make its forward pass by the reference path (run.kernels = \"reference\", KernelChoiceGuard(KernelChoice::Reference))",
                             received, std::move(gradients));
}

/// [rows, last dimension] view; copies only where rows cannot be described by one stride or a row is not contiguous.
inline at::Tensor as_rows(const at::Tensor& tensor) {
  const int64_t dim = tensor.size(-1);
  const at::Tensor rows = tensor.dim() == 2 ? tensor : tensor.reshape({dim == 0 ? 0 : tensor.numel() / dim, dim});
  return rows.stride(1) == 1 ? rows : rows.contiguous();
}

}  // namespace tessera::kernels
