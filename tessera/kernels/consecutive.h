#pragma once

#include <cstdint>

#include <ATen/core/Tensor.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>

namespace tessera::kernels {

/// first, first + 1, ... as int64 [count]. Memory is asked for first: where at::arange makes a tensor grow on meta, no allocator hears of it, and a dry
/// run would miss it.
inline at::Tensor consecutive(int64_t first, int64_t count, at::Device device) {
  at::Tensor out = at::empty({count}, at::TensorOptions(at::kLong).device(device));
  return at::arange_out(out, first, first + count, 1);
}

}  // namespace tessera::kernels
