#include <algorithm>
#include <optional>
#include <vector>

#include <ATen/WrapDimUtils.h>
#include <ATen/ops/clamp_min.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/mul.h>

#include "tessera/kernels/meta/registration.h"

namespace tessera::kernels::meta {

namespace {

at::Tensor relu(const at::Tensor& self) { return at::clamp_min(self, 0); }

at::Tensor abs(const at::Tensor& self) { return at::empty_like(self, self.options().dtype(c10::toRealValueType(self.scalar_type()))); }

at::Tensor mse_loss_backward(const at::Tensor&, const at::Tensor& self, const at::Tensor&, int64_t) { return at::empty_like(self); }

std::tuple<at::Tensor, at::Tensor> dropout(const at::Tensor& input, double, std::optional<bool>) {
  const at::Tensor output = at::empty_like(input);
  return {output, at::empty_like(input, input.options().dtype(at::kBool))};
}

at::Tensor dropout_backward(const at::Tensor& grad, const at::Tensor& mask, double) { return at::mul(grad, mask); }

/// Smallest or largest of all elements.
at::Tensor extreme(const at::Tensor& self) { return at::empty({}, self.options()); }

/// Libtorch's own works on meta, but resizes a result that it makes without elements, which nobody is told of there.
at::Tensor logsumexp(const at::Tensor& self, at::IntArrayRef dims, bool keepdim) {
  std::vector<int64_t> kept = self.sizes().vec(), result;
  for (const int64_t dim : dims) kept[static_cast<size_t>(at::maybe_wrap_dim(dim, self.dim()))] = 1;
  for (int64_t dim = 0; dim < self.dim(); ++dim) {
    const bool reduced = std::ranges::any_of(dims, [&](int64_t one) { return at::maybe_wrap_dim(one, self.dim()) == dim; });
    if (keepdim || !reduced) result.push_back(kept[static_cast<size_t>(dim)]);
  }
  const at::Tensor largest = at::empty(kept, self.options()), terms = at::empty_like(self);
  return at::empty(result, self.options());
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, Meta, m) {
  implement(m, "relu", relu);
  implement(m, "abs", abs);
  implement(m, "mse_loss_backward", mse_loss_backward);
  implement(m, "native_dropout", dropout);
  implement(m, "native_dropout_backward", dropout_backward);
  implement(m, "max", extreme);
  implement(m, "min", extreme);
  implement(m, "logsumexp", logsumexp);
}

}  // namespace tessera::kernels::meta
