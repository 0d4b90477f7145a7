#pragma once

#include "tessera/data_parallel/distributed_data_parallel.h"
#include "tests/nn/net.h"

namespace tessera::testing_support {

inline void run_step(Net& net, DistributedDataParallel& ddp, const Batch& batch) {
  ddp.begin_step();
  backward(net, batch);
  ddp.finish();
}

}  // namespace tessera::testing_support
