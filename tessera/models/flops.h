#pragma once

#include <cstdint>

#include "tessera/config/config.h"

namespace tessera {

/// Parameters that take part in a matrix product for every token: all weights of linear layers and the head, not the embedding look-ups, norms and biases;
/// of experts as many as a token visits.
/// A tied weight counts as the head. Expects a resolved configuration.
int64_t num_matmul_parameters(const ModelConfig& config);

/// All parameters, tied ones once.
int64_t num_parameters(const ModelConfig& config);

/// Those that one token meets: all but the experts that it does not visit.
int64_t num_active_parameters(const ModelConfig& config);

/// Keys that a query of a sequence of `seq_len` tokens is counted with: all, causal or not, which is twice as many as it sees on average. With
/// model.sliding_window = W below seq_len as much more than it sees: 2 W - W^2 / seq_len.
double counted_keys(const ModelConfig& config, int64_t seq_len);

/// Model FLOPs of training on one token: 6 per matrix-product parameter (2 forward, 4 backward) and 12 * layers * dim * counted_keys for attention's two
/// products. Recomputation does not count.
double model_flops_per_token(const ModelConfig& config, int64_t seq_len);

}  // namespace tessera
