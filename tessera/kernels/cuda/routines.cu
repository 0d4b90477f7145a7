#include <cuda_runtime_api.h>

#include "tessera/kernels/cuda/routines.cuh"

namespace tessera::kernels::cuda {

namespace {

/// Tensor cores take bf16 from sm80 on.
bool multiplies_bf16(c10::DeviceIndex device) {
  int major = 0;
  return cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device < 0 ? 0 : device) == cudaSuccess && major >= 8;
}

[[maybe_unused]] const bool registered = [] {
  static const Routines routines{rms_norm_routines(),      layer_norm_routines(), pointwise_routines(),
                                 cross_entropy_routines(), dispatch_routines(),   multiplies_bf16};
  register_routines(c10::kCUDA, routines);
  return true;
}();

}  // namespace
}  // namespace tessera::kernels::cuda
