#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "tessera/optim/optimizer.h"

namespace tessera::precision {

/// AdamW or SGD, as `config` names it, on bf16 weights that have no wider copy: weights and state are bf16, updates are made in fp32 element by element and
/// rounded stochastically (kernels/stochastic_update.h), so the bits depend on (seed, logical name, number of the update, index of the element) and not on
/// which rank holds the element. State tensors have the names of the plain optimizer's. Works on meta.
///   memory   2 bytes an element for each tensor of state: with bf16 gradients 8 bytes a parameter in all, where fp32 masters take 16
/// Throws ConfigError on another optimizer, naming it.
std::unique_ptr<optim::Optimizer> make_stochastic_rounding(const OptimConfig& config, uint64_t seed, const std::vector<nn::NamedParameter>& parameters);

}  // namespace tessera::precision
