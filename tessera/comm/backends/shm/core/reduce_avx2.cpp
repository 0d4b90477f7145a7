// AVX2; cmake/TesseraShm.cmake sets this file's flags.
#include "tessera/comm/backends/shm/core/reduce_loops.h"

namespace tessera::comm::shm {

const ReduceLoops* reduce_loops_avx2() {
#if defined(__AVX2__)
  static constexpr ReduceLoops loops = make_reduce_loops();
  return &loops;
#else
  return nullptr;
#endif
}

}  // namespace tessera::comm::shm
