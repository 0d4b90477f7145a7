#include "tessera/kernels/products.h"

#include <algorithm>
#include <array>
#include <cctype>
#include <cstdlib>
#include <optional>
#include <utility>

#include <ATen/ops/addmm.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/mm.h>

#include "tessera/core/ambient.h"
#include "tessera/core/autograd_function.h"
#include "tessera/core/error.h"
#include "tessera/kernels/processor.h"
#include "tessera/kernels/routines.h"

// Casts around a product would do the same arithmetic, but autograd would keep the wide operands for backward. Here a function of its own keeps the narrow ones
// and widens them again. The three gradients are functions by themselves, so that who computes one of them later gets the very bits.

namespace tessera::kernels {

namespace {

/// What a guard has said: 1 native products, -1 none; 0: as the machine is.
const Ambient<int> native;
const Ambient<bool> device_with_fp16;

std::string variable(const char* name) {
  const char* value = std::getenv(name);
  return value ? value : "";
}

/// The bf16 products that the processor has: of x86 vectors, of its tiles, of Arm.
std::string instructions() {
  std::string found;
  for (const char* name : {"amx_bf16", "avx512_bf16", "bf16"}) {
    if (processor_has(name)) found += (found.empty() ? "" : ", ") + std::string(name);
  }
  return found;
}

at::Tensor rows_of(const at::Tensor& x) { return x.dim() == 2 ? x : x.dim() == 1 ? x.unsqueeze(0) : x.flatten(0, -2); }

std::vector<int64_t> with_features(const at::Tensor& x, int64_t features) {
  auto sizes = x.sizes().vec();
  sizes.back() = features;
  return sizes;
}

/// Keeps the narrow operands, where autograd through casts would keep the wide ones.
struct WidenedLinear : AutogradFunction<WidenedLinear> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias) {
    context->save_for_backward({x, weight});
    context->saved_data["bias"] = bias.has_value();
    const at::Tensor rows = rows_of(x).to(at::kFloat), wide = weight.to(at::kFloat).t();
    const at::Tensor sum = bias ? at::addmm(bias->to(at::kFloat), rows, wide) : at::mm(rows, wide);
    return sum.to(x.scalar_type()).view(with_features(x, weight.size(0)));
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context, const torch::autograd::variable_list& grads) {
    const auto saved = context->get_saved_variables();
    const at::Tensor &x = saved[0], &weight = saved[1];
    at::Tensor dx, d_weight, d_bias;
    if (context->needs_input_grad(0)) dx = linear_input_gradient(grads[0], weight, x.sizes());
    if (context->needs_input_grad(1)) d_weight = linear_weight_gradient(grads[0], x);
    if (context->saved_data["bias"].toBool() && context->needs_input_grad(2)) d_bias = linear_bias_gradient(grads[0]);
    return {dx, d_weight, d_bias};
  }
};

}  // namespace

CpuFormats CpuFormats::from(std::string_view instructions, std::string_view max_isa, std::string_view forced) {
  require(forced.empty() || forced == "fp32" || forced == "bf16", "TESSERA_CPU_FORMATS = ", forced,
          ": expected fp32 (make bf16 products in fp32), bf16 (leave them to libtorch), or nothing, to go by the processor");
  if (!forced.empty()) return {.bf16 = forced == "bf16", .reason = detail::concat("TESSERA_CPU_FORMATS = ", forced)};
  if (instructions.empty()) return {.bf16 = false, .reason = "it has neither avx512_bf16 nor amx_bf16"};
  std::string isa(max_isa);
  std::transform(isa.begin(), isa.end(), isa.begin(), [](unsigned char c) { return std::tolower(c); });
  constexpr std::array<std::string_view, 7> without{"sse41", "avx", "avx2", "avx2_vnni", "avx2_vnni_2", "avx512_core", "avx512_core_vnni"};
  if (std::find(without.begin(), without.end(), isa) != without.end()) return {.bf16 = false, .reason = detail::concat("ONEDNN_MAX_CPU_ISA = ", max_isa)};
  return {.bf16 = true, .reason = std::string(instructions)};
}

const CpuFormats& cpu_formats() {
  static const CpuFormats formats = [] {
    const std::string older = variable("DNNL_MAX_CPU_ISA"), isa = variable("ONEDNN_MAX_CPU_ISA");
    return CpuFormats::from(instructions(), isa.empty() ? older : isa, variable("TESSERA_CPU_FORMATS"));
  }();
  return formats;
}

bool multiplies_bf16(c10::Device device) {
  if (device.is_cpu() || device.is_meta()) return *native != 0 ? *native > 0 : cpu_formats().bf16;
  const auto multiplies = device_multiplies_bf16(device.type());
  return multiplies == nullptr || multiplies(device.index());
}

bool is_planned(c10::Device device) { return device.is_meta() && *native != 0; }

Bf16ProductsGuard::Bf16ProductsGuard(bool native_products) : former_(std::exchange(*native, native_products ? 1 : -1)) {}
Bf16ProductsGuard::~Bf16ProductsGuard() { *native = former_; }

Fp16ProductsGuard::Fp16ProductsGuard() : former_(std::exchange(*device_with_fp16, true)) {}
Fp16ProductsGuard::~Fp16ProductsGuard() { *device_with_fp16 = former_; }

bool is_widened(at::ScalarType dtype, c10::Device device) {
  if (!device.is_cpu() && !device.is_meta()) return false;
  if (dtype == at::kHalf) return !(device.is_meta() && *device_with_fp16);
  return dtype == at::kBFloat16 && !multiplies_bf16(device);
}

at::Tensor linear(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias) {
  if (!is_widened(x)) return at::linear(x, weight, bias);
  return WidenedLinear::apply(x, weight, bias.defined() ? std::optional(bias) : std::nullopt);
}

at::Tensor linear_input_gradient(const at::Tensor& dy, const at::Tensor& weight, at::IntArrayRef sizes) {
  const at::Tensor rows = rows_of(dy);
  if (!is_widened(dy)) return at::mm(rows, weight).view(sizes);
  return at::mm(rows.to(at::kFloat), weight.to(at::kFloat)).to(dy.scalar_type()).view(sizes);
}

at::Tensor linear_weight_gradient(const at::Tensor& dy, const at::Tensor& x, const GradientPlace& place) {
  if (place.defined()) {
    at::Tensor gradient = place.memory;
    return at::addmm_out(gradient, gradient, rows_of(dy).t(), rows_of(x), /*beta=*/place.holds_sum ? 1 : 0);
  }
  if (!is_widened(dy)) return at::mm(rows_of(dy).t(), rows_of(x));
  return at::mm(rows_of(dy).to(at::kFloat).t(), rows_of(x).to(at::kFloat)).to(dy.scalar_type());
}

at::Tensor linear_bias_gradient(const at::Tensor& dy) {
  const at::Tensor rows = rows_of(dy);
  return is_widened(dy) ? rows.to(at::kFloat).sum(0).to(dy.scalar_type()) : rows.sum(0);
}

}  // namespace tessera::kernels
