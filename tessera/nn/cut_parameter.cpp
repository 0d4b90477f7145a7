#include "tessera/nn/cut_parameter.h"

#include <ATen/core/grad_mode.h>

#include "tessera/core/error.h"
#include "tessera/memory/memory.h"
#include "tessera/nn/kept_memory.h"
#include "tessera/nn/meta.h"
#include "tessera/nn/parameter.h"
#include "tessera/nn/shared_memory.h"

namespace tessera::nn {

namespace {
/// A net that was widened by doubling its units.
bool is_one_part_repeated(const at::Tensor& whole, int64_t dim, int64_t size) {
  const int64_t all = whole.size(dim);
  if (whole.is_meta() || !whole.is_floating_point() || size == 0 || size == all || all % size != 0) return false;
  return whole.narrow(dim, 0, all - size).equal(whole.narrow(dim, size, all - size));
}
}  // namespace

void cut_parameter(const at::Tensor& parameter, int64_t dim, int64_t begin, int64_t size) {
  const Slice& held = slice_of(parameter);
  const bool is_repeated = is_one_part_repeated(parameter.detach(), dim, size);
  cut_parameter(parameter, Slice::along(held.name, held.shape, dim, begin, size));
  if (is_repeated) note_alike_at_cut(parameter);
}

void cut_parameter(const at::Tensor& parameter, Slice part) {
  const at::NoGradGuard no_grad;
  const Slice& held = slice_of(parameter);
  if (held == part) return;
  invariant(held.is_whole(), "'", held.name, "' is cut already, and in another way");
  if (parameter.is_meta()) {
    // What is not materialized does not count, as in on_meta: a rank of a pipeline cuts the layers of all stages, and keeps its own.
    MemoryTracker unread;
    const TrackMemory track(unread);
    set_slice(parameter, std::move(part));
    materialize_storage(parameter, at::kMeta);
    return;
  }
  FormerMemory former("parallelize_module, expert_parallel", {{.name = held.name, .tensor = parameter, .aliases = {}}});
  const at::Tensor values = take(parameter.detach(), part).clone();
  set_slice(parameter, std::move(part));
  materialize_storage(parameter, parameter.device());
  parameter.copy_(values);
  former.refuse_use();
}

}  // namespace tessera::nn
