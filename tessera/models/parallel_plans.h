#pragma once

#include "tessera/models/model.h"
#include "tessera/nn/parallel_plan.h"

namespace tessera {

/// How the model is cut over a tensor-parallel group (parallelize_module). The residual stream is whole on every rank, or, with `sequence_parallel`, cut along
/// the sequence, and with it norms and dropout. Attention is cut by whole heads, its keys and values shared where there are more ranks than key-value heads;
/// the vocabulary over embedding and head. Of a mixture of experts the router is whole on every rank and shared experts are cut as a feed-forward layer is; the
/// others belong to whoever deals experts. `keep_gathered`: what attention and feed-forward layers take is kept whole until backward (PrepareInput).
ParallelPlan parallel_plan(const LanguageModel& model, bool sequence_parallel, bool keep_gathered = false);

}  // namespace tessera
