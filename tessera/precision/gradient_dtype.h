#pragma once

#include <vector>

#include "tessera/core/attachment.h"
#include "tessera/nn/parameter.h"

namespace tessera::precision {

/// Brings the gradients of `parameters` into `dtype` as autograd hands them over in the parameters' own, before they are added up: over micro-batches here, and
/// over ranks by whoever has buckets of that dtype. Memory: a gradient in both dtypes for a moment.
[[nodiscard]] Attachment keep_gradients_in(at::ScalarType dtype, const std::vector<nn::NamedParameter>& parameters);

}  // namespace tessera::precision
