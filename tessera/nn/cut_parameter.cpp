#include "tessera/nn/cut_parameter.h"

#include <ATen/core/grad_mode.h>

#include "tessera/core/error.h"
#include "tessera/nn/meta.h"
#include "tessera/nn/parameter.h"

namespace tessera::nn {

void cut_parameter(const at::Tensor& parameter, int64_t dim, int64_t begin, int64_t size) {
  const at::NoGradGuard no_grad;
  const Slice& held = slice_of(parameter);
  Slice part = Slice::along(held.name, held.shape, dim, begin, size);
  if (held == part) return;
  invariant(held.is_whole(), "'", held.name, "' is cut already, and in another way");
  const at::Tensor values = parameter.is_meta() ? at::Tensor() : parameter.detach().narrow(dim, begin, size).clone();
  set_slice(parameter, std::move(part));
  materialize_storage(parameter, parameter.device());
  if (values.defined()) parameter.copy_(values);
}

}  // namespace tessera::nn
