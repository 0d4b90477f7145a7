#include "tessera/nn/expanded.h"

namespace tessera::nn {

at::Tensor written_once(at::Tensor tensor, const at::Tensor& like) {
  for (int64_t d = 0; d < like.dim(); ++d) {
    if (like.stride(d) == 0 && like.size(d) > 1) tensor = tensor.narrow(d, 0, 1);
  }
  return tensor;
}

}  // namespace tessera::nn
