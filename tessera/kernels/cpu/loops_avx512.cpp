// AVX-512 (F, BW, CD, DQ, VL); cmake/TesseraKernels.cmake sets this file's flags.
#include "tessera/kernels/cpu/loops_table.h"

namespace tessera::kernels::cpu {

const Loops* loops_avx512() {
#if defined(__AVX512F__)
  static constexpr Loops loops = make_loops("avx512");
  return &loops;
#else
  return nullptr;
#endif
}

}  // namespace tessera::kernels::cpu
