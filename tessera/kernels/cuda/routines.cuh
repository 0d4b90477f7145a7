#pragma once

#include "tessera/kernels/routines.h"

/// One function per group of kernels, each in its own file.
namespace tessera::kernels::cuda {

RmsNormRoutines rms_norm_routines();
LayerNormRoutines layer_norm_routines();
PointwiseRoutines pointwise_routines();
CrossEntropyRoutines cross_entropy_routines();
DispatchRoutines dispatch_routines();

/// out <- x + added, elements side by side; out may be x.
void add_elements(const at::Tensor& out, const at::Tensor& x, const at::Tensor& added);

}  // namespace tessera::kernels::cuda
