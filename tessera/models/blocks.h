#pragma once

#include <optional>

#include <ATen/core/Tensor.h>

#include "tessera/config/config.h"
#include "tessera/nn/attention.h"
#include "tessera/nn/dropout.h"
#include "tessera/nn/linear.h"
#include "tessera/nn/norm.h"

/// Parts that several families share.
namespace tessera {

/// Legend: B rows, S positions, D model width, H query heads, K key-value heads, F width inside the feed-forward layer.

/// Standard deviation of initial weights, and of those that write to the residual stream: each of the 2 * layers additions is scaled so that the variance of
/// the stream does not grow with depth (GPT-2).
inline constexpr double kInitStd = 0.02;
double residual_std(int64_t layers);

/// Features of a head, dim / heads. Throws ConfigError where heads do not divide dim, or kv_heads heads.
int64_t head_dim(const ModelConfig& config);

/// LayerNorm over the model's width, with model.norm_eps.
nn::LayerNormOptions norm_options(const ModelConfig& config);

/// Weights from a normal distribution, biases zero.
void set_init_normal(nn::LinearImpl& linear, double std);

/// The residual stream plus what a part of a block makes of it, in the stream's dtype. Where the part computes in another one, it is cast first: a mixed
/// addition would make the same copy out of sight, and a second result beside it.
at::Tensor add_to_stream(const at::Tensor& stream, const at::Tensor& part);

/// Self-attention: x [B, S, D] -> [B, S, D]; wq [D, D], wk and wv [K * D/H, D], wo [D, D], and the parameterless "core". The number of heads follows from
/// the weights that are there, so a rank that holds some of the heads runs the same code. With rotary tables [S, D/H/2] queries and keys are rotated.
class SelfAttentionImpl : public nn::Module {
 public:
  SelfAttentionImpl(const ModelConfig& config, bool bias);

  at::Tensor forward(const at::Tensor& x, const std::optional<at::Tensor>& cos, const std::optional<at::Tensor>& sin,
                     const std::optional<at::Tensor>& positions, const std::optional<at::Tensor>& document_ids);

 private:
  int64_t head_dim_;
  nn::Linear wq_, wk_, wv_, wo_;
  nn::AttentionCore core_;
};
TESSERA_MODULE(SelfAttention);

/// w2(silu(w1 x) * w3 x) (arXiv:2002.05202): w1, w3 [F, D], w2 [D, F], no biases.
class GatedFeedForwardImpl : public nn::Module {
 public:
  explicit GatedFeedForwardImpl(const ModelConfig& config);
  at::Tensor forward(const at::Tensor& x);

 private:
  nn::Linear w1_, w2_, w3_;
};
TESSERA_MODULE(GatedFeedForward);

/// w2(gelu(w1 x)) with the tanh form of GELU, with biases: w1 [F, D], w2 [D, F].
class FeedForwardImpl : public nn::Module {
 public:
  explicit FeedForwardImpl(const ModelConfig& config);
  at::Tensor forward(const at::Tensor& x);

 private:
  nn::Linear w1_, w2_;
};
TESSERA_MODULE(FeedForward);

}  // namespace tessera
