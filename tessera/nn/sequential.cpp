#include "tessera/nn/sequential.h"

namespace tessera::nn {

at::Tensor SequentialImpl::forward(const at::Tensor& x) {
  at::Tensor out = x;
  for (const auto& step : steps_) out = step(out);
  return out;
}

}  // namespace tessera::nn
