#pragma once

#include <vector>

#include <ATen/core/ScalarType.h>

#include "tessera/nn/parameter.h"

namespace tessera::precision {

/// Who adds the micro-batches' gradients up.
enum class AddedUp {
  Here,       ///< autograd, in the parameter's grad()
  Elsewhere,  ///< who takes each gradient away as it comes: slices of fully_shard, the fixed tree
};

/// From now on the gradients of 16-bit `parameters` are handed over, and added up, in `dtype`: over the uses of a parameter and over micro-batches here, and
/// over ranks by whoever has buckets of that dtype. Layers of ours hand their parameters' gradients on unrounded (kernels/widen.h), and what a plain module
/// brings in 16 bits is widened. Of what is added up elsewhere a gradient that came in 16 bits stays so until then, unless several layers use the parameter.
/// Memory: the gradient in `dtype`, and where it came in 16 bits in both for a moment.
void take_gradients_in(at::ScalarType dtype, const std::vector<nn::NamedParameter>& parameters, AddedUp added_up = AddedUp::Here);

}  // namespace tessera::precision
