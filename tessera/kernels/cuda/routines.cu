#include "tessera/kernels/cuda/routines.cuh"

namespace tessera::kernels::cuda {

namespace {

[[maybe_unused]] const bool registered = [] {
  static const Routines routines{rms_norm_routines(), pointwise_routines(), cross_entropy_routines()};
  register_routines(c10::kCUDA, routines);
  return true;
}();

}  // namespace
}  // namespace tessera::kernels::cuda
