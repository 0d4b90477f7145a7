// AVX-512 with rounding to bf16 in one instruction; cmake/TesseraKernels.cmake sets this file's flags.
#include "tessera/kernels/cpu/loops_table.h"

namespace tessera::kernels::cpu {

const Loops* loops_avx512_bf16() {
#if defined(__AVX512BF16__)
  static constexpr Loops loops = make_loops("avx512_bf16");
  return &loops;
#else
  return nullptr;
#endif
}

}  // namespace tessera::kernels::cpu
