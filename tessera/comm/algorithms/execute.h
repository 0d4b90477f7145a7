#pragma once

#include <ATen/core/Tensor.h>

#include "tessera/comm/algorithms/program.h"
#include "tessera/comm/group.h"

namespace tessera::comm {

/// Carries out a rank's program through the engine's send and recv, under kPlanTag (tags.h), on CPU tensors, and returns when all is done. `scratch` has the
/// program's elements, of the call's dtype. Sums: each addition takes two numbers of the tensor's dtype and rounds once (bf16 and fp16 add in fp32), in the
/// plan's order, so all ranks get the same bits; a bf16 sum is rounded once per hop of its chunk. Throws what the engine throws; its messages of the step may
/// be under way still.
void execute(const Program& program, const Call& call, const at::Tensor& scratch, Engine& engine);

}  // namespace tessera::comm
