#pragma once

#include <ATen/core/Tensor.h>

namespace tessera::kernels {

/// Rotary position embedding (Su et al., arXiv:2104.09864) in the rotate-half layout of Hugging Face: feature i turns with feature i + D/2. Differentiable in
/// `x`.
///   x         [B, S, H, D]                D even, fp32 or bf16; any strides as long as a head's features are contiguous
///   cos, sin  [S, D/2] or [B, S, D/2]     fp32; row s is the angle of the token at s, so any positions (a shard's, a document's, a cache's) are a matter of
///   the table result    [B, S, H, D]                contiguous, x's dtype: [x1 cos - x2 sin, x2 cos + x1 sin]
/// Memory: the result; nothing but the tables is kept for backward, which is the rotation by the opposite angle.
/// Throws ConfigError where shapes do not fit.
at::Tensor rope(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin);

}  // namespace tessera::kernels
