// Whatever the target architecture always has (SSE2 on x86-64, NEON on AArch64).
#include "tessera/kernels/cpu/loops_table.h"

namespace tessera::kernels::cpu {

const Loops* loops_baseline() {
  static constexpr Loops loops = make_loops("baseline");
  return &loops;
}

}  // namespace tessera::kernels::cpu
