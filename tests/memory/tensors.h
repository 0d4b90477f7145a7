#pragma once

#include <ATen/ops/empty.h>

namespace tessera::testing_support {

inline constexpr int64_t kib = 1024;

inline at::Tensor floats(int64_t bytes, at::Device device = at::kCPU) { return at::empty({bytes / 4}, at::TensorOptions(device).dtype(at::kFloat)); }

}  // namespace tessera::testing_support
