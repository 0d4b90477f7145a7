#include "tessera/models/flops.h"

#include "tessera/core/error.h"
#include "tessera/models/blocks.h"
#include "tessera/models/model.h"
#include "tessera/nn/meta.h"
#include "tessera/nn/parameter.h"

namespace tessera {

namespace {

int64_t attention_weights(const ModelConfig& config) {
  const int64_t kv_dim = config.kv_heads.value_or(config.heads) * head_dim(config);
  return 2 * config.dim * config.dim + 2 * config.dim * kv_dim;
}

/// Of a block, for each token: of the experts those that a token visits.
int64_t feed_forward_weights(const ModelConfig& config) {
  const int64_t products = config.family == "llama" || config.family == "mixtral" ? 3 : 2, one = products * config.dim * config.ffn_dim.value();
  if (config.experts == 0) return one;
  const int64_t shared = products * config.dim * config.shared_ffn_dim + (config.shared_ffn_dim > 0 && config.shared_gate ? config.dim : 0);
  return config.experts_per_token * one + shared + config.experts * config.dim;
}

}  // namespace

int64_t num_matmul_parameters(const ModelConfig& config) {
  const int64_t attention = config.family == "mlp" ? 0 : attention_weights(config);
  return config.layers * (attention + feed_forward_weights(config)) + config.vocab_size * config.dim;
}

int64_t num_parameters(const ModelConfig& config) {
  const auto model = on_meta([&] { return make_model(config); });
  int64_t total = 0;
  for (const auto& parameter : nn::unique_parameters(*model)) total += parameter.tensor.numel();
  return total;
}

int64_t num_active_parameters(const ModelConfig& config) {
  const int64_t idle = (config.experts - config.experts_per_token) * 3 * config.dim * config.ffn_dim.value_or(0);
  return num_parameters(config) - config.layers * idle;
}

double counted_keys(const ModelConfig& config, int64_t seq_len) {
  const auto length = static_cast<double>(seq_len), window = static_cast<double>(config.sliding_window);
  return config.sliding_window == 0 || window >= length ? length : 2 * window - window * window / length;
}

double model_flops_per_token(const ModelConfig& config, int64_t seq_len) {
  const double attention = config.family == "mlp" ? 0.0 : 12.0 * static_cast<double>(config.layers * config.dim) * counted_keys(config, seq_len);
  return 6.0 * static_cast<double>(num_matmul_parameters(config)) + attention;
}

}  // namespace tessera
