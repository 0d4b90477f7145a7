#include "tessera/nn/sequential.h"

#include "tessera/nn/calls.h"

namespace tessera::nn {

at::Tensor SequentialImpl::forward(const at::Tensor& x) {
  if (bypassed(*this)) return call(*this, x);
  at::Tensor out = x;
  for (const auto& step : steps_) out = step(out);
  return out;
}

}  // namespace tessera::nn
