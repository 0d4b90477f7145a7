#pragma once

#include <optional>
#include <utility>

#include "tessera/nn/module.h"

namespace tessera::nn {

/// Tables of the rotary position embedding (arXiv:2104.09864): angle(position, i) = position * theta^(-2i / head_dim).
///   positions [S] int64 below max_seq_len, or none for 0 .. columns - 1
///   -> cos, sin [S, head_dim / 2] fp32
/// The angles are computed in fp32 as Hugging Face does. No buffers and no parameters: the table of max_seq_len positions is made at the first call on a device
/// that asks for them in order, and kept, so that construction on meta, sharding and checkpoints have nothing to carry. Of `positions` the angles are computed
/// in each call, to the same bits: a rank that holds a part of a sequence has no table of all of it.
class RotaryEmbeddingImpl : public Module {
 public:
  RotaryEmbeddingImpl(int64_t head_dim, int64_t max_seq_len, double theta);

  std::pair<at::Tensor, at::Tensor> forward(int64_t columns, const std::optional<at::Tensor>& positions, at::Device device);

 private:
  std::pair<at::Tensor, at::Tensor> angles(const at::Tensor& positions) const;

  int64_t head_dim_, max_seq_len_;
  double theta_;
  at::Tensor frequencies_;  ///< [head_dim / 2]
  at::Tensor cos_, sin_;    ///< [max_seq_len, head_dim / 2]
};
TESSERA_MODULE(RotaryEmbedding);

}  // namespace tessera::nn
