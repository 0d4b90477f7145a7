#pragma once

#include <optional>
#include <utility>

#include "tessera/nn/module.h"

namespace tessera::nn {

/// Tables of the rotary position embedding (arXiv:2104.09864): angle(position, i) = position * theta^(-2i / head_dim).
///   positions [S] int64, or none for first .. first + columns - 1
///   -> cos, sin [S, head_dim / 2] fp32
/// The angles are computed in fp32 as Hugging Face does. No buffers and no parameters: the table of max_seq_len positions is made at the first call on a device
/// and kept, so that construction on meta, sharding and checkpoints have nothing to carry.
class RotaryEmbeddingImpl : public Module {
 public:
  RotaryEmbeddingImpl(int64_t head_dim, int64_t max_seq_len, double theta);

  std::pair<at::Tensor, at::Tensor> forward(int64_t columns, const std::optional<at::Tensor>& positions, at::Device device);

 private:
  int64_t head_dim_, max_seq_len_;
  double theta_;
  at::Tensor cos_, sin_;  ///< [max_seq_len, head_dim / 2]
};
TESSERA_MODULE(RotaryEmbedding);

}  // namespace tessera::nn
