#pragma once

#include <ATen/core/Tensor.h>

#include "tessera/comm/call.h"

/// Minima and maxima of floating-point numbers where a library's own keep a NaN or lose it by its place (Gloo: std::min, NCCL: fminf; MPI promises nothing): it
/// reduces integers of the same order instead, of which NaN is the most extreme. -0 is below +0.
namespace tessera::comm {

/// Whether such a reduction is asked for: of fp16, bf16, fp32 or fp64.
bool is_extremum(at::ScalarType dtype, Op op);
bool is_extremum(const Call& call);

/// As many integers: int64 of fp64, else int32.
at::Tensor to_ordered(const at::Tensor& numbers, Op op);

/// numbers <- what `ordered`, which is overwritten, stands for.
void from_ordered(at::Tensor ordered, const at::Tensor& numbers);

/// Bytes of what to_ordered makes; of all that stands for the tensors of a call, 0 for others.
int64_t ordered_bytes(const at::Tensor& numbers);
int64_t ordered_bytes(const Call& call);

}  // namespace tessera::comm
