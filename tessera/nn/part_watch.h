#pragma once

#include <memory>
#include <string>
#include <vector>

#include "tessera/core/attachment.h"
#include "tessera/nn/parameter.h"

namespace tessera::nn {

/// Refuses, by name (ConfigError), what this thread does to `parts`, parameters that `technique` has cut over ranks, as if they were whole: draws values into
/// them, takes norms of their gradients (libtorch's clip_grad_norm_). Until the attachment goes. What shards them further refuses by itself. Costs what an
/// OperatorWatch costs; holds no parameter.
[[nodiscard]] Attachment watch_parts(std::string technique, const std::vector<NamedParameter>& parts);

}  // namespace tessera::nn
