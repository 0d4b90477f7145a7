#pragma once

#include <memory>

#include "tessera/nn/interceptor.h"
#include "tessera/tensor_parallel/convert.h"

namespace tessera::tensor_parallel {

/// Around a module whose tensor `argument` has to be the same on every rank of the group: at each call the ranks compare its hash (shape, dtype, values) and
/// all throw the same CommError where they differ, naming the module and the ranks. A call without that tensor, and a dry run's, passes.
/// Cost: a hash of the tensor, and an all-gather of 8 bytes.
std::shared_ptr<nn::Interceptor> same_input(std::shared_ptr<Context> context, int argument);

}  // namespace tessera::tensor_parallel
