#pragma once

#include <cstdint>

#include <ATen/core/Tensor.h>

#include "tessera/layout/slice.h"

namespace tessera::nn {

/// The parameter keeps `part` of itself, in place: handles that hold it see the part, and its slice says which. On meta it is still without memory; with
/// values, the rest is freed. A tied parameter that has been cut this way already stays as it is.
/// Views that somebody keeps of the whole are refused where they are used (FormerMemory).
/// Throws InternalError for a parameter that is cut in another way.
void cut_parameter(const at::Tensor& parameter, Slice part);

/// The same of `begin` .. `begin + size` of dimension `dim`.
void cut_parameter(const at::Tensor& parameter, int64_t dim, int64_t begin, int64_t size);

}  // namespace tessera::nn
