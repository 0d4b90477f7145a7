#include "tessera/models/blocks.h"

#include <cmath>

#include "tessera/core/error.h"
#include "tessera/kernels/bias_activation.h"
#include "tessera/kernels/rope.h"
#include "tessera/kernels/swiglu.h"
#include "tessera/nn/calls.h"
#include "tessera/nn/parameter.h"

namespace tessera {

double residual_std(int64_t layers) { return kInitStd / std::sqrt(2.0 * static_cast<double>(std::max<int64_t>(layers, 1))); }

void set_init_normal(nn::LinearImpl& linear, double std) {
  nn::set_init(linear.weight, nn::InitRule::normal(0, std));
  if (linear.bias.defined()) nn::set_init(linear.bias, nn::InitRule::zeros());
}

int64_t head_dim(const ModelConfig& config) {
  require(config.heads > 0 && config.dim > 0 && config.dim % config.heads == 0, "model.dim = ", config.dim,
          " must be a positive multiple of model.heads = ", config.heads);
  const int64_t kv_heads = config.kv_heads.value_or(config.heads);
  require(kv_heads > 0 && config.heads % kv_heads == 0, "model.heads = ", config.heads, " must be a multiple of model.kv_heads = ", kv_heads);
  return config.dim / config.heads;
}

nn::LayerNormOptions norm_options(const ModelConfig& config) { return nn::LayerNormOptions({config.dim}).eps(config.norm_eps); }

at::Tensor add_to_stream(const at::Tensor& stream, const at::Tensor& part) {
  return part.scalar_type() == stream.scalar_type() ? stream + part : part.to(stream.scalar_type()).add_(stream);
}

namespace {

nn::Linear linear(int64_t in, int64_t out, bool bias, double std) {
  nn::Linear layer(nn::LinearOptions(in, out).bias(bias));
  set_init_normal(*layer, std);
  return layer;
}

int64_t ffn_dim(const ModelConfig& config) {
  require(config.ffn_dim.value_or(0) > 0, "model.ffn_dim must be a positive number");
  return *config.ffn_dim;
}

}  // namespace

SelfAttentionImpl::SelfAttentionImpl(const ModelConfig& config, bool bias)
    : head_dim_(head_dim(config)),
      wq_(linear(config.dim, config.dim, bias, kInitStd)),
      wk_(linear(config.dim, config.kv_heads.value_or(config.heads) * head_dim_, bias, kInitStd)),
      wv_(linear(config.dim, config.kv_heads.value_or(config.heads) * head_dim_, bias, kInitStd)),
      wo_(linear(config.dim, config.dim, bias, residual_std(config.layers))),
      core_(nn::AttentionReach{.window = config.sliding_window}) {
  register_module("wq", wq_);
  register_module("wk", wk_);
  register_module("wv", wv_);
  register_module("core", core_);
  register_module("wo", wo_);
}

at::Tensor SelfAttentionImpl::forward(const at::Tensor& x, const std::optional<at::Tensor>& cos, const std::optional<at::Tensor>& sin,
                                      const std::optional<at::Tensor>& positions, const std::optional<at::Tensor>& document_ids) {
  if (nn::bypassed(*this)) return nn::call(*this, x, cos, sin, positions, document_ids);
  const auto heads = [&](const at::Tensor& projected) { return projected.unflatten(-1, {-1, head_dim_}); };
  at::Tensor q = heads(wq_(x)), k = heads(wk_(x));
  const at::Tensor v = heads(wv_(x));
  if (cos) {
    q = kernels::rope(q, *cos, *sin);
    k = kernels::rope(k, *cos, *sin);
  }
  return wo_(core_(q, k, v, positions, document_ids).flatten(-2));
}

GatedFeedForwardImpl::GatedFeedForwardImpl(const ModelConfig& config)
    : w1_(linear(config.dim, ffn_dim(config), false, kInitStd)),
      w2_(linear(ffn_dim(config), config.dim, false, residual_std(config.layers))),
      w3_(linear(config.dim, ffn_dim(config), false, kInitStd)) {
  register_module("w1", w1_);
  register_module("w2", w2_);
  register_module("w3", w3_);
}

at::Tensor GatedFeedForwardImpl::forward(const at::Tensor& x) {
  if (nn::bypassed(*this)) return nn::call(*this, x);
  return w2_(kernels::swiglu(w1_(x), w3_(x)));
}

FeedForwardImpl::FeedForwardImpl(const ModelConfig& config)
    : w1_(linear(config.dim, ffn_dim(config), true, kInitStd)), w2_(linear(ffn_dim(config), config.dim, true, residual_std(config.layers))) {
  register_module("w1", w1_);
  register_module("w2", w2_);
}

at::Tensor FeedForwardImpl::forward(const at::Tensor& x) {
  if (nn::bypassed(*this)) return nn::call(*this, x);
  return w2_(kernels::activate(w1_(x), kernels::Activation::Gelu));
}

}  // namespace tessera
