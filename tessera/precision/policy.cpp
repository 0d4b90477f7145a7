#include "tessera/precision/policy.h"

#include "tessera/core/error.h"
#include "tessera/nn/module.h"

namespace tessera::precision {

Policy policy_from(const PrecisionConfig& config) {
  require(config.params == "fp32", "precision.params = ", config.params, ": not built yet; available: fp32");
  require(config.compute == "fp32" || config.compute == "bf16", "precision.compute = ", config.compute, ": not built yet; available: fp32, bf16");
  return {.params = at::kFloat, .compute = config.compute == "bf16" ? at::kBFloat16 : at::kFloat};
}

void apply(torch::nn::Module& root, const Policy& policy) {
  root.apply([&](torch::nn::Module& module) {
    if (auto* ours = dynamic_cast<nn::Module*>(&module)) ours->set_compute_dtype(policy.compute);
  });
}

}  // namespace tessera::precision
