#pragma once

#include <cstdint>

#include <ATen/core/Tensor.h>

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

}  // namespace tessera
