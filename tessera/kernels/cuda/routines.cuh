#pragma once

#include "tessera/kernels/routines.h"

/// One function per group of kernels, each in its own file.
namespace tessera::kernels::cuda {

RmsNormRoutines rms_norm_routines();
PointwiseRoutines pointwise_routines();
CrossEntropyRoutines cross_entropy_routines();
DispatchRoutines dispatch_routines();

}  // namespace tessera::kernels::cuda
