#include <optional>

#include <ATen/ops/clamp_min.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/mul.h>

#include "tessera/kernels/meta/registration.h"

namespace tessera::kernels::meta {

namespace {

at::Tensor relu(const at::Tensor& self) { return at::clamp_min(self, 0); }

at::Tensor abs(const at::Tensor& self) { return at::empty_like(self); }

at::Tensor mse_loss_backward(const at::Tensor&, const at::Tensor& self, const at::Tensor&, int64_t) { return at::empty_like(self); }

std::tuple<at::Tensor, at::Tensor> dropout(const at::Tensor& input, double, std::optional<bool>) {
  const at::Tensor output = at::empty_like(input);
  return {output, at::empty_like(input, input.options().dtype(at::kBool))};
}

at::Tensor dropout_backward(const at::Tensor& grad, const at::Tensor& mask, double) { return at::mul(grad, mask); }

/// Smallest or largest of all elements.
at::Tensor extreme(const at::Tensor& self) { return at::empty({}, self.options()); }

}  // namespace

TORCH_LIBRARY_IMPL(aten, Meta, m) {
  implement(m, "relu", relu);
  implement(m, "abs", abs);
  implement(m, "mse_loss_backward", mse_loss_backward);
  implement(m, "native_dropout", dropout);
  implement(m, "native_dropout_backward", dropout_backward);
  implement(m, "max", extreme);
  implement(m, "min", extreme);
}

}  // namespace tessera::kernels::meta
