#pragma once

#include <cstdint>

#include <ATen/core/Tensor.h>

namespace tessera::kernels {

/// Where the features of a local tensor lie in the whole model's: columns feature_offset .. + D of feature_total (0: the tensor's own D, that is, unsplit).
struct FeatureBlock {
  int64_t offset = 0;
  int64_t total = 0;
};

/// Global row of every local token: sample_positions[b] * sequence_total + sequence_offset + s, as int64 [B * S]. Compute it once per micro-batch and hand it
/// to every dropout.
///   sample_positions  [B] int64, the global positions of the local samples
at::Tensor dropout_rows(const at::Tensor& sample_positions, int64_t sequence_offset, int64_t sequence_length, int64_t sequence_total);
/// The same of columns that lie anywhere: sample_positions[b] * sequence_total + columns[s]; columns [S] int64.
at::Tensor dropout_rows(const at::Tensor& sample_positions, const at::Tensor& columns, int64_t sequence_total);

/// Dropout whose mask is a pure function of `key` and of each element's place in the whole model's tensor, so any layout drops the same elements.
/// Differentiable in `x`.
///   x       [..., D]  fp32 or bf16
///   key     CounterRng(seed, stream).key(): one stream per module and step
///   rows    [numel / D] int64: global row of each local row (dropout_rows); any order, so zig-zag shards and permuted tokens work too
///   result  x / (1 - p) where uniform(row * feature_total + feature) >= p, else 0
/// The mask is never stored: backward draws it again. Kept for backward: `rows` alone. p = 0 returns x itself. Throws ConfigError unless 0 <= p < 1 and rows
/// fits x.
at::Tensor dropout(const at::Tensor& x, double p, uint64_t key, const at::Tensor& rows, FeatureBlock features = {});

}  // namespace tessera::kernels
