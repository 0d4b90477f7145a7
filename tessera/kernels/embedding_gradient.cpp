#include "tessera/kernels/embedding_gradient.h"

#include "tessera/kernels/choice.h"
#include "tessera/kernels/operator.h"
#include "tessera/kernels/reference.h"
#include "tessera/kernels/routines.h"

namespace tessera::kernels {

void add_embedding_gradient_(const at::Tensor& sum, const at::Tensor& rows, const at::Tensor& ids, int64_t padding_row) {
  require(sum.dim() == 2 && rows.numel() == ids.numel() * sum.size(1), "embedding gradient: sum ", sum.sizes(), " must be [rows, features], and rows ",
          rows.sizes(), " one for each of ids ", ids.sizes());
  if (rows.numel() == 0) return;
  const at::Tensor given = rows.reshape({-1, sum.size(1)}), named = ids.reshape({-1});
  const bool taken = sum.scalar_type() == at::kFloat || (sum.scalar_type() == at::kBFloat16 && (sum.is_cpu() || sum.is_meta()));
  const bool fused = taken && sum.is_contiguous() && is_supported(rows.scalar_type());
  if (takes_reference(Kernel::embedding_gradient) || !fused) return reference::add_embedding_gradient_(sum, given, named, padding_row);
  routines_for(sum).pointwise.embedding_gradient(sum, given.contiguous(), named.contiguous(), padding_row);
}

}  // namespace tessera::kernels
