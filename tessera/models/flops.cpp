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

}  // namespace

int64_t num_matmul_parameters(const ModelConfig& config) {
  const int64_t products_of_ffn = config.family == "llama" ? 3 : 2;
  const int64_t attention = config.family == "mlp" ? 0 : attention_weights(config);
  return config.layers * (attention + products_of_ffn * config.dim * config.ffn_dim.value()) + config.vocab_size * config.dim;
}

int64_t num_parameters(const ModelConfig& config) {
  const auto model = on_meta([&] { return make_model(config); });
  int64_t total = 0;
  for (const auto& parameter : nn::unique_parameters(*model)) total += parameter.tensor.numel();
  return total;
}

double model_flops_per_token(const ModelConfig& config, int64_t seq_len) {
  const double attention = config.family == "mlp" ? 0.0 : 12.0 * static_cast<double>(config.layers * config.dim * seq_len);
  return 6.0 * static_cast<double>(num_matmul_parameters(config)) + attention;
}

}  // namespace tessera
