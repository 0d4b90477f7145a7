#include "tessera/kernels/embedding_gradient.h"

#include "tessera/kernels/operator.h"
#include "tessera/kernels/routines.h"

namespace tessera::kernels {

void add_embedding_gradient_(const at::Tensor& sum, const at::Tensor& rows, const at::Tensor& ids, int64_t padding_row) {
  require(sum.dim() == 2 && sum.scalar_type() == at::kFloat && sum.is_contiguous() && rows.numel() == ids.numel() * sum.size(1), "embedding gradient: sum ",
          sum.sizes(), " must be contiguous fp32 [rows, features], and rows ", rows.sizes(), " one for each of ids ", ids.sizes());
  if (rows.numel() == 0) return;
  require_supported("embedding gradient", rows);
  routines_for(sum).pointwise.embedding_gradient(sum, rows.reshape({-1, sum.size(1)}).contiguous(), ids.reshape({-1}).contiguous(), padding_row);
}

}  // namespace tessera::kernels
