#pragma once

#include "tessera/comm/call.h"

/// Gloo and NCCL know a few types of numbers. What is only moved they may take for another type of the same width, and a sum of complex numbers for one of
/// their parts.
namespace tessera::comm {

/// Whether both know it: fp32, fp64, fp16, bf16, int8, uint8, int32, int64 and truth values.
bool is_carried(at::ScalarType dtype);

/// The same memory under the name of a type that they know.
at::Tensor as_carried(const at::Tensor& tensor);

/// A call as NCCL takes it, messages included; one that it cannot carry out, such as a sum of int16, stays as it is.
Call carried_by_nccl(const Call& call);

}  // namespace tessera::comm
