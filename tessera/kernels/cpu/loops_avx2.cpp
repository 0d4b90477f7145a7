// AVX2 and FMA; cmake/TesseraKernels.cmake sets this file's flags.
#include "tessera/kernels/cpu/loops_table.h"

namespace tessera::kernels::cpu {

const Loops* loops_avx2() {
#if defined(__AVX2__)
  static constexpr Loops loops = make_loops("avx2");
  return &loops;
#else
  return nullptr;
#endif
}

}  // namespace tessera::kernels::cpu
