#pragma once

#include <memory>

#include "tessera/nn/interceptor.h"
#include "tessera/nn/parallel_plan.h"
#include "tessera/tensor_parallel/convert.h"

/// Sequence parallelism (Korthikanti et al., arXiv:2205.05198): what treats every position by itself works on a part of the sequence.
namespace tessera::tensor_parallel {

/// Around a module that gets its part: random masks are those of its positions in the whole sequence.
std::shared_ptr<nn::Interceptor> sequence_parallel(std::shared_ptr<Context> context);

/// Around a module whose argument comes in another layout than it takes. Where a sequence is gathered, the module's layers keep this rank's part of it for
/// backward and gather it again (regather.h).
std::shared_ptr<nn::Interceptor> prepare_input(std::shared_ptr<Context> context, const PrepareInput& style);
std::shared_ptr<nn::Interceptor> prepare_output(std::shared_ptr<Context> context, const PrepareOutput& style);

/// Around the layers of a plan, one for all: the length of the sequence is state of the pass (nn/pass_state.h).
std::shared_ptr<nn::Interceptor> keeps_length(std::shared_ptr<Context> context);

/// Around a module whose result's layout is stated and not changed. `share`: this rank's heads, where features are cut.
std::shared_ptr<nn::Interceptor> gives(std::shared_ptr<Context> context, const Gives& style, const FeatureShare& share);

}  // namespace tessera::tensor_parallel
