#pragma once

#include <string>

#include <c10/core/ScalarType.h>
#include <torch/nn/module.h>

#include "tessera/core/config.h"

namespace tessera::precision {

/// Which dtype carries what. Norms, softmax, loss and the residual stream are fp32 whatever `compute` says.
struct Policy {
  at::ScalarType params = at::kFloat;   ///< stored weights
  at::ScalarType compute = at::kFloat;  ///< operands of matrix products and attention
};

/// Reads `precision.*`. Throws ConfigError on a dtype that this version does not carry.
Policy policy_from(const PrecisionConfig& config);

/// Sets the compute dtype of every interceptable module below `root`; plain torch::nn modules compute in their parameters' dtype and are left alone.
void apply(torch::nn::Module& root, const Policy& policy);

}  // namespace tessera::precision
