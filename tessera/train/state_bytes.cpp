#include "tessera/train/state_bytes.h"

#include <c10/core/ScalarType.h>

#include "tessera/precision/policy.h"

namespace tessera {

BytesPerParameter bytes_per_parameter(const Config& config) {
  const auto policy = precision::policy_from(config.precision);
  const auto bytes = [](at::ScalarType dtype) { return static_cast<double>(c10::elementSize(dtype)); };
  const double tensors = config.optim.name == "adamw" ? 2 : config.optim.momentum > 0 ? 1 : 0;  // of state, in the dtype of what is updated
  return {.weight = bytes(policy.params),
          .gradient = bytes(policy.gradient_dtype().value_or(policy.params)),
          .state = tensors * bytes(policy.master) + (policy.has_masters() ? bytes(policy.master) : 0)};
}

BytesPerParameter kept_per_parameter(const BytesPerParameter& whole, int stage, int ranks) {
  return {.weight = whole.weight / (stage >= 3 ? ranks : 1),
          .gradient = whole.gradient / (stage >= 2 ? ranks : 1),
          .state = whole.state / (stage >= 1 ? ranks : 1)};
}

}  // namespace tessera
