#include <optional>

#include <ATen/cpu/Utils.h>
#include <ATen/ops/empty.h>

#include "tessera/kernels/meta/registration.h"
#include "tessera/kernels/products.h"

namespace tessera::kernels::meta {

namespace {

/// Whether libtorch makes the product in fp32, as it does on processors that have no tiles for it. An accelerator has products of its own.
bool is_emulated(const at::Tensor& left, const at::Tensor& right) {
  if (!is_widened(at::kHalf, c10::Device(at::kMeta))) return false;
  static const auto capabilities = at::cpu::get_cpu_capabilities();
  const auto found = capabilities.find(left.scalar_type() == right.scalar_type() ? "amx_int8" : "amx_fp16");
  return found == capabilities.end() || !found->second.toBool();
}

/// Both operands in fp32, each with its scale and for a moment without, and the product.
void take_scratch(const at::Tensor& left, const at::Tensor& right, const at::Tensor& out) {
  const auto wide = [](at::IntArrayRef sizes) { return at::empty(sizes, at::TensorOptions(at::kMeta).dtype(at::kFloat)); };
  const auto scaled = [&](const at::Tensor& operand) {
    const at::Tensor plain = wide(operand.sizes());
    return wide(operand.sizes());
  };
  const at::Tensor rows = right.is_contiguous() ? right : at::empty(right.sizes(), right.options());
  const at::Tensor a = scaled(left), b = scaled(right);
  const at::Tensor product = wide(out.sizes());
  const at::Tensor rounded = out.scalar_type() == at::kFloat ? product : at::empty(out.sizes(), out.options());
}

/// [M, K] x [K, N], with scales applied on the way out.
at::Tensor scaled_mm(const at::Tensor& self, const at::Tensor& mat2, const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&,
                     const std::optional<at::Tensor>&, std::optional<at::ScalarType> out_dtype, bool) {
  const at::Tensor out = at::empty({self.size(0), mat2.size(1)}, self.options().dtype(out_dtype.value_or(self.scalar_type())));
  if (is_emulated(self, mat2)) take_scratch(self, mat2, out);
  return out;
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, Meta, m) { implement(m, "_scaled_mm", scaled_mm); }

}  // namespace tessera::kernels::meta
