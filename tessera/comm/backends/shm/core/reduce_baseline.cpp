// The instruction set that every processor of this architecture has; cmake/TesseraShm.cmake sets this file's flags.
#include "tessera/comm/backends/shm/core/reduce_loops.h"

namespace tessera::comm::shm {

const ReduceLoops* reduce_loops_baseline() {
  static constexpr ReduceLoops loops = make_reduce_loops();
  return &loops;
}

}  // namespace tessera::comm::shm
