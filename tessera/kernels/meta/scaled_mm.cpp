#include <exception>
#include <memory>
#include <optional>
#include <string_view>
#include <thread>

#include <ATen/ops/_scaled_mm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <ATen/record_function.h>

#include "tessera/kernels/meta/registration.h"
#include "tessera/kernels/products.h"

namespace tessera::kernels::meta {

namespace {

thread_local bool* in_fp32 = nullptr;  // of the thread that asks: a callback takes nothing along

/// Whether libtorch makes a product of these types in fp32, asked by making one. On a thread of its own, where nobody counts its memory or sees its operators.
bool makes_in_fp32(at::ScalarType left, at::ScalarType right) {
  bool seen = false;
  std::thread([&] {
    constexpr int64_t size = 16;
    const auto operand = [](at::ScalarType dtype) { return at::zeros({size, size}, at::device(at::kCPU).dtype(at::kFloat)).to(dtype); };
    const at::Tensor a = operand(left), b = operand(right), scales = at::ones({size, 1}, at::device(at::kCPU).dtype(at::kFloat));
    in_fp32 = &seen;
    const auto callback = at::addThreadLocalCallback(at::RecordFunctionCallback([](const at::RecordFunction& call) -> std::unique_ptr<at::ObserverContext> {
                                                       if (std::string_view(call.name()) == "aten::mm") *in_fp32 = true;
                                                       return nullptr;
                                                     }).scopes({at::RecordScope::FUNCTION}));
    try {
      at::_scaled_mm(a, b.t(), scales, scales.t(), /*bias=*/{}, /*scale_result=*/{}, at::kFloat, /*use_fast_accum=*/false);
    } catch (const std::exception&) {  // then a run is refused where it makes one, and not a plan
    }
    at::removeCallback(callback);
  }).join();
  return seen;
}

/// Whether libtorch makes the product in fp32, as it does on processors for which oneDNN has none: which those are changes from build to build, and having
/// tiles is not enough. An accelerator has products of its own.
bool is_emulated(const at::Tensor& left, const at::Tensor& right) {
  if (!is_widened(at::kHalf, c10::Device(at::kMeta))) return false;
  static const bool alike = makes_in_fp32(at::kFloat8_e4m3fn, at::kFloat8_e4m3fn), mixed = makes_in_fp32(at::kFloat8_e5m2, at::kFloat8_e4m3fn);
  return left.scalar_type() == right.scalar_type() ? alike : mixed;
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
