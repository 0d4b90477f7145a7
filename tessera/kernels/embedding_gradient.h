#pragma once

#include <ATen/core/Tensor.h>

namespace tessera::kernels {

/// The gradient of a row look-up, added up where it is to end: sum[ids[n]] += rows[n], in the order of n, whatever the number of threads (each has some of the
/// columns).
///   sum   [V, D]    fp32 and contiguous, on a CPU bf16, too, which is rounded once a call; of other types by the reference, an index_add in fp32
///   rows  [..., D]  fp32 or bf16, added as it is: what came for each id
///   ids   [...]     int64; tokens of `padding_row` (none: -1) are left out
/// Traffic: rows once, and of sum the rows that are named, read and written once (on devices once a token). Throws ConfigError for an id that is no row.
void add_embedding_gradient_(const at::Tensor& sum, const at::Tensor& rows, const at::Tensor& ids, int64_t padding_row);

}  // namespace tessera::kernels
