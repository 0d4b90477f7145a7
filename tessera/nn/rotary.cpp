#include "tessera/nn/rotary.h"

#include <tuple>

#include <ATen/ops/outer.h>
#include <ATen/ops/pow.h>
#include <c10/core/InferenceMode.h>

#include "tessera/core/error.h"
#include "tessera/kernels/consecutive.h"
#include "tessera/memory/memory.h"
#include "tessera/nn/sample_scope.h"

namespace tessera::nn {

RotaryEmbeddingImpl::RotaryEmbeddingImpl(int64_t head_dim, int64_t max_seq_len, double theta) : head_dim_(head_dim), max_seq_len_(max_seq_len), theta_(theta) {
  require(head_dim > 0 && head_dim % 2 == 0, "RotaryEmbedding: ", head_dim,
          " features of a head cannot be rotated in pairs; choose dim and heads so that dim / heads is even");
}

std::pair<at::Tensor, at::Tensor> RotaryEmbeddingImpl::angles(const at::Tensor& positions) const {
  const at::Tensor turned = at::outer(positions.to(at::kFloat), frequencies_);
  return {turned.cos(), turned.sin()};
}

std::pair<at::Tensor, at::Tensor> RotaryEmbeddingImpl::forward(int64_t columns, const std::optional<at::Tensor>& positions, at::Device device) {
  require(positions || columns <= max_seq_len_, "a sequence of ", columns, " tokens is longer than model.max_seq_len = ", max_seq_len_,
          "; raise it, or shorten the sequence");
  const bool kept = frequencies_.defined() && frequencies_.device() == device;
  if (!kept || (!positions && !cos_.defined())) {
    // Kept beyond this call, so neither recorded by autograd nor made an inference tensor, whoever calls first.
    const MemoryScope scope(MemoryCategory::Other);
    const c10::InferenceMode plain(false);
    const at::NoGradGuard no_grad;
    const at::Tensor even = kernels::consecutive(0, head_dim_ / 2, device).mul_(2).to(at::kFloat);
    frequencies_ = at::pow(theta_, even / static_cast<double>(head_dim_)).reciprocal();
    cos_ = sin_ = at::Tensor();
    if (!positions) std::tie(cos_, sin_) = angles(kernels::consecutive(0, max_seq_len_, device));
  }
  if (positions) return angles(*positions);
  return {cos_.narrow(0, 0, columns), sin_.narrow(0, 0, columns)};
}

}  // namespace tessera::nn
