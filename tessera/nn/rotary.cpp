#include "tessera/nn/rotary.h"

#include <ATen/ops/outer.h>
#include <ATen/ops/pow.h>
#include <c10/core/InferenceMode.h>

#include "tessera/core/error.h"
#include "tessera/memory/memory.h"
#include "tessera/nn/sample_scope.h"

namespace tessera::nn {

RotaryEmbeddingImpl::RotaryEmbeddingImpl(int64_t head_dim, int64_t max_seq_len, double theta) : head_dim_(head_dim), max_seq_len_(max_seq_len), theta_(theta) {
  require(head_dim > 0 && head_dim % 2 == 0, "RotaryEmbedding: ", head_dim,
          " features of a head cannot be rotated in pairs; choose dim and heads so that dim / heads is even");
}

std::pair<at::Tensor, at::Tensor> RotaryEmbeddingImpl::forward(int64_t columns, const std::optional<at::Tensor>& positions, at::Device device) {
  require(columns <= max_seq_len_, "a sequence of ", columns, " tokens is longer than model.max_seq_len = ", max_seq_len_,
          "; raise it, or shorten the sequence");
  if (!cos_.defined() || cos_.device() != device) {
    // Kept beyond this call, so neither recorded by autograd nor made an inference tensor, whoever calls first.
    const MemoryScope scope(MemoryCategory::Other);
    const c10::InferenceMode plain(false);
    const at::NoGradGuard no_grad;
    const at::Tensor even = consecutive(0, head_dim_ / 2, device).mul_(2).to(at::kFloat);
    const at::Tensor frequencies = at::pow(theta_, even / static_cast<double>(head_dim_)).reciprocal();
    const at::Tensor angles = at::outer(consecutive(0, max_seq_len_, device).to(at::kFloat), frequencies);
    cos_ = angles.cos();
    sin_ = angles.sin();
  }
  if (positions) return {cos_.index_select(0, *positions), sin_.index_select(0, *positions)};
  return {cos_.narrow(0, 0, columns), sin_.narrow(0, 0, columns)};
}

}  // namespace tessera::nn
