#pragma once

#include <vector>

#include <ATen/core/Tensor.h>

#include "tessera/kernels/attention.h"
#include "tessera/nn/attention_tiles.h"

/// Exact attention tile by tile: the fused kernel computes each, and what queries have seen of different keys is merged by log-sum-exp in fp32, so nothing of
/// the size S x L is held and scores may be as large as fp32 goes. Outside of autograd but for tiled_attention. Layout: q [B, S, H, D]; k, v [B, L, K, D].
namespace tessera::nn {

/// Where a fused or tiled attention meets a second derivative.
inline constexpr const char* kAttentionTwice = "write softmax(scale q k^T) v by libtorch's operators where it is differentiated twice";

/// The softmax of queries over keys that come block by block. Memory: the output in fp32 and B H S floats.
class TiledAttention {
 public:
  explicit TiledAttention(at::Tensor q) : q_(std::move(q)) {}

  /// Adds what the queries see of these keys. A pair of a query and a key must not be added twice.
  void add(const at::Tensor& k, const at::Tensor& v, const std::vector<AttentionTile>& tiles);
  /// [B, S, H, D] in q's dtype, zeros where a query saw nothing; log-sum-exp [B, H, S] fp32.
  kernels::AttentionOutput finish();

 private:
  void begin();
  bool is_first(const AttentionTile& tile);
  void merge(const AttentionTile& tile, const kernels::AttentionOutput& part);

  at::Tensor q_, output_, log_sum_exp_;
  std::vector<bool> seen_;  ///< [B * S]: what has no part yet is written, not merged
};

/// The gradients, block by block in any order. Memory: dq in fp32.
class TiledAttentionBackward {
 public:
  /// `forward`: what TiledAttention gave.
  TiledAttentionBackward(at::Tensor grad_output, at::Tensor q, kernels::AttentionOutput forward);

  /// Adds these tiles' part to dq, and to dk, dv [B, L, K, D] fp32.
  void add(const at::Tensor& k, const at::Tensor& v, const std::vector<AttentionTile>& tiles, const at::Tensor& dk, const at::Tensor& dv);
  /// dq [B, S, H, D] in q's dtype.
  at::Tensor finish();

 private:
  at::Tensor grad_, q_, dq_;
  kernels::AttentionOutput forward_;
};

/// Attention of q to k and v, differentiable. Kept for backward: q, k, v, the output, B H S floats and the tiles.
at::Tensor tiled_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, std::vector<AttentionTile> tiles);

}  // namespace tessera::nn
