#pragma once

#include <string>
#include <string_view>

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

#include "tessera/kernels/gradient_place.h"

/// Matrix products of 16-bit numbers on processors without instructions for them. There libtorch emulates them, several times slower than fp32; here operands
/// are widened, which is exact, multiplied in fp32, whose kernels are fast everywhere, and the result is rounded once. So the bits differ from those of a
/// processor that has the products by the order of fp32 sums and no more.
namespace tessera::kernels {

/// Whether this machine's CPU multiplies bf16, as libtorch's libraries may use it.
struct CpuFormats {
  bool bf16 = false;
  std::string reason;  ///< "avx512_bf16"; or what is missing, or forbids it

  /// `instructions`: those for bf16 products that the processor has, comma-separated; `max_isa`: ONEDNN_MAX_CPU_ISA; `forced`: TESSERA_CPU_FORMATS, which is
  /// fp32 (widen all the same), bf16 (leave them to libtorch) or empty. Throws ConfigError on anything else.
  static CpuFormats from(std::string_view instructions, std::string_view max_isa, std::string_view forced);
};

/// Looked up once in the process.
const CpuFormats& cpu_formats();

/// Whether `device` multiplies bf16: a CPU, and meta, as cpu_formats() or this thread's guard says, a CUDA device from sm80 on.
bool multiplies_bf16(c10::Device device);

/// Whether `device` is meta and this thread's guard says what it multiplies: a plan's device, of which this machine's CPU says nothing.
bool is_planned(c10::Device device);

/// Sets for this thread whether the CPU, or the device that a dry run stands for, multiplies bf16, and restores the former answer when destroyed. A backward
/// pass follows the forward that recorded it.
class Bf16ProductsGuard {
 public:
  explicit Bf16ProductsGuard(bool native);
  ~Bf16ProductsGuard();
  Bf16ProductsGuard(const Bf16ProductsGuard&) = delete;
  Bf16ProductsGuard& operator=(const Bf16ProductsGuard&) = delete;

 private:
  int former_;
};

/// While alive, on this thread, a dry run stands for a device that multiplies fp16, as every accelerator does; else for a CPU, where such products are widened
/// (products.h). A backward pass follows the forward that recorded it.
class Fp16ProductsGuard {
 public:
  Fp16ProductsGuard();
  ~Fp16ProductsGuard();
  Fp16ProductsGuard(const Fp16ProductsGuard&) = delete;
  Fp16ProductsGuard& operator=(const Fp16ProductsGuard&) = delete;

 private:
  bool former_;
};

/// Whether products of `dtype` on `device` are made in fp32: bf16 where it is not multiplied, fp16 on every CPU.
bool is_widened(at::ScalarType dtype, c10::Device device);
inline bool is_widened(const at::Tensor& tensor) { return is_widened(tensor.scalar_type(), tensor.device()); }

/// x weight^T + bias of one dtype, as at::linear; `bias` may be undefined. Where is_widened(): the sum with the bias is rounded, each gradient is, and what is
/// kept for backward are x and weight as they are. Memory while it runs: fp32 copies of both operands and of the result.
at::Tensor linear(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias = {});

/// What backward of linear() makes of `dy` [..., O], one by one and outside of autograd, with the very bits of the whole: the gradient of x, in its `sizes`;
/// that of weight [O, I]; that of bias [O].
at::Tensor linear_input_gradient(const at::Tensor& dy, const at::Tensor& weight, at::IntArrayRef sizes);
at::Tensor linear_weight_gradient(const at::Tensor& dy, const at::Tensor& x, const GradientPlace& place = {});  ///< `place`, where it has one
at::Tensor linear_bias_gradient(const at::Tensor& dy);

}  // namespace tessera::kernels
