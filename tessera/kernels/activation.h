#pragma once

#include <cstdint>

namespace tessera::kernels {

/// Functions x s(u(x)) with the sigmoid s that are fused with what stands beside them.
enum class Activation : uint8_t {
  Silu,  ///< u = x
  Gelu,  ///< u = 2 sqrt(2 / pi) (x + 0.044715 x^3): the tanh form of GELU (arXiv:1606.08415), as GPT-2 has it
};

}  // namespace tessera::kernels
