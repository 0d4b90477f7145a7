#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "tessera/optim/optimizer.h"

namespace tessera::optim {

/// AdamW, Lion or SGD with state in bf16 (optim.state_dtype), of weights in fp32 or in bf16 that have no wider copy (precision.master = bf16): updates are made
/// in fp32 element by element, and what is kept in bf16 is rounded stochastically (kernels/stochastic_update.h), so the bits depend on (seed, logical name,
/// number of the update, index of the element) and not on which rank holds the element. State tensors have the names of the plain optimizer's. Works on meta.
///   memory   2 bytes an element for each tensor of state: AdamW 4, Lion 2; with bf16 weights and gradients 8 bytes a parameter in all under AdamW, where fp32
///            masters take 16
/// Throws ConfigError on another optimizer, and on other weights, naming them.
std::unique_ptr<Optimizer> make_rounded(const OptimConfig& settings, std::vector<ParameterGroup> groups, uint64_t seed);

}  // namespace tessera::optim
