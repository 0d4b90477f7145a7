#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

#include <ATen/core/Tensor.h>

#include "tessera/models/model.h"

namespace tessera {

/// How the next token is chosen from the logits.
struct SampleOptions {
  double temperature = 1.0;  ///< 0: always the most likely
  int64_t top_k = 0;         ///< only the k most likely; 0: all
  double top_p = 1.0;        ///< only the most likely that together reach this probability (arXiv:1904.09751)
  uint64_t seed = 0;
};

/// Draws one token from logits [V]. The draw is a function of (options.seed, index): the same text for the same seed. Among equals the lowest id comes first.
/// Throws ConfigError for options out of range and for logits that are not finite.
int64_t sample_token(const at::Tensor& logits, const SampleOptions& options, uint64_t index);

/// Continues `prompt` (at least one token) by up to `max_new_tokens`, stopping after `end_of_text` where one is given; returns the new tokens and hands
/// each to `on_token` as it comes (false stops). Dropout is off. Where the context is full, the older half is forgotten and the rest read again.
/// Of a model whose layers are cut over ranks: collective, with the same arguments on each; all draw the same token, from logits that are gathered for the last
/// position alone. Besides what the layers send for each token read, that is (t-1)/t V numbers a token made, of the compute dtype.
std::vector<int64_t> generate(LanguageModel& model, const std::vector<int64_t>& prompt, int64_t max_new_tokens, const SampleOptions& options,
                              std::optional<int64_t> end_of_text = std::nullopt, const std::function<bool(int64_t)>& on_token = {});

}  // namespace tessera
