#pragma once

#include <memory>
#include <string>

#include <ATen/ATen.h>

#include "tessera/models/model.h"
#include "tessera/nn/meta.h"
#include "tests/test_device.h"

namespace tessera {

/// A model small enough for a test, with sizes that divide nothing by accident.
inline ModelConfig tiny_config(const std::string& family) {
  ModelConfig config;
  config.family = family;
  config.dim = 24;
  config.layers = 2;
  config.heads = 6;
  config.kv_heads = family == "gpt2" ? 6 : 2;
  config.ffn_dim = 40;
  config.vocab_size = 37;
  config.max_seq_len = 16;
  if (family == "mixtral") {
    config.experts = 5;
    config.experts_per_token = 2;
  }
  return config;
}

inline std::shared_ptr<LanguageModel> tiny_model(const ModelConfig& config, uint64_t seed = 1) {
  auto model = on_meta([&] { return make_model(config); });
  materialize(*model, seed, testing_support::test_device());
  return model;
}

/// Weights large enough that every part of the model matters to the result.
inline void enlarge(LanguageModel& model) {
  const at::NoGradGuard no_grad;
  for (const auto& parameter : model.parameters()) parameter.dim() > 1 ? parameter.mul_(8.0) : parameter.add_(at::randn(parameter.sizes()) * 0.3);
}

}  // namespace tessera
