#pragma once

#include "tessera/comm/group.h"
#include "tessera/pipeline/schedules/schedule.h"
#include "tessera/pipeline/split/split.h"

namespace tessera::pipeline {

/// Sums, in place, the gradients of parameters that several stages hold (tied embeddings), so that their copies are updated alike and stay equal. Once a step,
/// behind the executor's run. The terms are added from the last stage to the first; stages of one rank share their tensor and so their gradient.
/// Traffic: of each such parameter, its bytes to the rank of its first stage and back, for each further rank. Every rank of `ranks` calls it.
void sum_shared_gradients(const SplitModel& model, const schedules::Schedule& schedule, const comm::Group& ranks);

}  // namespace tessera::pipeline
