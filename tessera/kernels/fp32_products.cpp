#include "tessera/kernels/fp32_products.h"

#include <algorithm>
#include <array>
#include <cctype>
#include <cstdlib>
#include <utility>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include <ATen/core/Tensor.h>
#include <ATen/ops/addmm_cpu_dispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm_cpu_dispatch.h>

#include "tessera/core/ambient.h"
#include "tessera/core/error.h"
#include "tessera/kernels/processor.h"
#include "tessera/kernels/replace_operators.h"

// The operators of libtorch get kernels of ours, which hand everything on to libtorch's own unless a guard says otherwise: so what autograd, counters of FLOPs,
// recomputation and dry runs know of a product stays true, and modules of any origin gain by it.

namespace at::native {
/// left right * alpha, + result where beta is 1 (ATen/native/mkldnn/Matmul.h, which the wheel does not carry; the symbol is exported).
void mkldnn_matmul(const at::Tensor& left, const at::Tensor& right, const at::Tensor& result, float beta, float alpha);
}  // namespace at::native

namespace tessera::kernels {

namespace {

/// Multiplications from which on oneDNN's set-up, some 12 us, is paid for, and the shortest side that fills a register's rows.
constexpr int64_t kWorthwhile = int64_t{1} << 21;
constexpr int64_t kShortestSide = 8;

const Ambient<bool> wanted_here;

std::string maker_of_processor() {
#if defined(__x86_64__)
  unsigned highest = 0, b = 0, c = 0, d = 0;
  if (__get_cpuid(0, &highest, &b, &c, &d) == 0) return {};
  std::string maker;
  for (const unsigned word : {b, d, c}) {
    for (int byte = 0; byte < 4; ++byte) maker += static_cast<char>(word >> (8 * byte) & 0xffU);
  }
  return maker;
#else
  return {};
#endif
}

std::string variable_of(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? "" : value;
}

bool has_no_gaps(const at::Tensor& matrix) { return matrix.is_contiguous() || matrix.t().is_contiguous(); }

bool is_plain(const at::Tensor& tensor) { return tensor.scalar_type() == at::kFloat && tensor.dim() == 2 && !tensor.is_neg(); }

bool is_faster(const at::Tensor& left, const at::Tensor& right) {
  if (!*wanted_here || !cpu_products().onednn || !is_plain(left) || !is_plain(right) || left.size(1) != right.size(0)) return false;
  const int64_t rows = left.size(0), inner = left.size(1), columns = right.size(1);
  return std::min({rows, inner, columns}) >= kShortestSide && rows * inner * columns >= kWorthwhile && has_no_gaps(left) && has_no_gaps(right);
}

bool is_room_for(const at::Tensor& out, const at::Tensor& left, const at::Tensor& right) {
  return is_plain(out) && out.size(0) == left.size(0) && out.size(1) == right.size(1) && out.is_contiguous() && !out.is_alias_of(left) &&
         !out.is_alias_of(right);
}

at::Tensor& multiply_into(const at::Tensor& left, const at::Tensor& right, at::Tensor& out) {
  if (!is_faster(left, right) || !is_room_for(out, left, right)) return at::cpu::mm_outf(left, right, out);
  at::native::mkldnn_matmul(left, right, out, 0, 1);
  return out;
}

at::Tensor multiply(const at::Tensor& left, const at::Tensor& right) {
  if (!is_faster(left, right)) return at::cpu::mm(left, right);
  at::Tensor out = at::empty({left.size(0), right.size(1)}, left.options());
  return multiply_into(left, right, out);
}

at::Tensor& add_product_into(const at::Tensor& sum, const at::Tensor& left, const at::Tensor& right, const at::Scalar& beta, const at::Scalar& alpha,
                             at::Tensor& out) {
  const bool plain_sum = beta.toDouble() == 0 || (beta.toDouble() == 1 && sum.scalar_type() == at::kFloat);
  if (!is_faster(left, right) || !is_room_for(out, left, right) || alpha.toDouble() != 1 || !plain_sum) {
    return at::cpu::addmm_outf(sum, left, right, beta, alpha, out);
  }
  if (beta.toDouble() != 0 && !out.is_same(sum)) out.copy_(sum);
  at::native::mkldnn_matmul(left, right, out, beta.toFloat(), 1);
  return out;
}

at::Tensor add_product(const at::Tensor& sum, const at::Tensor& left, const at::Tensor& right, const at::Scalar& beta, const at::Scalar& alpha) {
  if (!is_faster(left, right)) return at::cpu::addmm(sum, left, right, beta, alpha);
  at::Tensor out = at::empty({left.size(0), right.size(1)}, left.options());
  return add_product_into(sum, left, right, beta, alpha, out);
}

[[maybe_unused]] const torch::Library replaced = replace_operators(__FILE__, __LINE__, [](torch::Library& library) {
  library.impl("mm", multiply);
  library.impl("mm.out", multiply_into);
  library.impl("addmm", add_product);
  library.impl("addmm.out", add_product_into);
});

}  // namespace

CpuProducts CpuProducts::from(std::string_view maker, bool avx512, std::string_view max_isa, std::string_view forced) {
  require(forced.empty() || forced == "onednn" || forced == "libtorch", "TESSERA_CPU_PRODUCTS = ", forced,
          ": expected onednn, libtorch (leave fp32 products to it), or nothing, to go by the processor");
  require(forced != "onednn" || avx512,
          "TESSERA_CPU_PRODUCTS = onednn: libtorch lets oneDNN multiply where a processor has avx512 (f, bw, vl and dq) alone, and "
          "this one has not; leave it unset");
  if (!forced.empty()) return {.onednn = forced == "onednn", .reason = detail::concat("TESSERA_CPU_PRODUCTS = ", forced)};
  if (maker.empty() || maker == "GenuineIntel") return {.onednn = false, .reason = "libtorch's own are made for this processor"};
  if (!avx512) return {.onednn = false, .reason = "it has no avx512, by which oneDNN would be faster"};
  std::string isa(max_isa);
  std::ranges::transform(isa, isa.begin(), [](unsigned char c) { return std::tolower(c); });
  if (isa.starts_with("sse") || isa.starts_with("avx2") || isa == "avx") return {.onednn = false, .reason = detail::concat("ONEDNN_MAX_CPU_ISA = ", max_isa)};
  return {.onednn = true, .reason = detail::concat(maker, " with avx512")};
}

const CpuProducts& cpu_products() {
  static const CpuProducts products = [] {
    const std::string older = variable_of("DNNL_MAX_CPU_ISA"), isa = variable_of("ONEDNN_MAX_CPU_ISA");
    // What mkldnn_matmul asks for, of fp32, too.
    const bool avx512 = std::ranges::all_of(std::array{"avx512_f", "avx512_bw", "avx512_vl", "avx512_dq"}, processor_has);
    return CpuProducts::from(maker_of_processor(), avx512, isa.empty() ? older : isa, variable_of("TESSERA_CPU_PRODUCTS"));
  }();
  return products;
}

FastProducts::FastProducts(bool fast) : former_(std::exchange(*wanted_here, fast)) {}
FastProducts::~FastProducts() { *wanted_here = former_; }
bool FastProducts::are_wanted() { return *wanted_here; }

}  // namespace tessera::kernels
