#include "tessera/nn/narrow_sum.h"

#include <ATen/ops/empty.h>

#include "tessera/memory/memory.h"
#include "tessera/nn/flat_gradients.h"

namespace tessera {

NarrowSum::NarrowSum(const at::Tensor& terms, at::ScalarType dtype, int ranks) : divisor_(dtype == at::kHalf ? ranks : 1) {
  const MemoryScope scratch(MemoryCategory::Comm);
  at::Tensor divided = terms;
  if (divisor_ != 1) divided.div_(divisor_);
  crossing_ = divided.to(dtype);
}

void NarrowSum::store(const at::Tensor& part, const at::Tensor& target, bool add) const {
  const MemoryScope scratch(MemoryCategory::Comm);
  // Cast explicitly: an operator on two dtypes would do it in memory that a dry run does not see.
  const at::Tensor sum = add ? part.to(target.scalar_type()) : at::Tensor(target).copy_(part);
  if (divisor_ != 1) at::Tensor(sum).mul_(divisor_);
  if (add) target.add_(sum);
}

void NarrowSum::release() { release_scratch(crossing_); }

}  // namespace tessera
