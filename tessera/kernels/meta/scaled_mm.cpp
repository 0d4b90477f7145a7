#include <optional>

#include <ATen/ops/empty.h>

#include "tessera/kernels/meta/registration.h"

namespace tessera::kernels::meta {

namespace {

/// [M, K] x [K, N], with scales applied on the way out. The CPU's product has no scratch of its own.
at::Tensor scaled_mm(const at::Tensor& self, const at::Tensor& mat2, const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&,
                     const std::optional<at::Tensor>&, std::optional<at::ScalarType> out_dtype, bool) {
  return at::empty({self.size(0), mat2.size(1)}, self.options().dtype(out_dtype.value_or(self.scalar_type())));
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, Meta, m) { implement(m, "_scaled_mm", scaled_mm); }

}  // namespace tessera::kernels::meta
