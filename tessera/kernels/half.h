#pragma once

#include <ATen/core/Tensor.h>

/// fp16 where the processor has no arithmetic for it: operands and results are rounded to fp16, what lies between is fp32. Gradients cross the same
/// conversions, so they are rounded as well, and overflow or vanish as fp16 does.
namespace tessera::kernels {

/// Whether operators on `tensor` are made of conversions and fp32 arithmetic. So on a CPU, and in a dry run, which is to hold the CPU's memory.
inline bool is_emulated_half(const at::Tensor& tensor) { return tensor.scalar_type() == at::kHalf && !tensor.is_cuda(); }

/// The values of `tensor`, rounded to fp16, in fp32.
inline at::Tensor rounded_to_half(const at::Tensor& tensor) { return tensor.to(at::kHalf).to(at::kFloat); }

}  // namespace tessera::kernels
