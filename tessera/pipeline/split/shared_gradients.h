#pragma once

#include <vector>

#include "tessera/comm/group.h"
#include "tessera/pipeline/schedules/schedule.h"
#include "tessera/pipeline/split/split.h"

namespace tessera::pipeline {

/// Sums, in place, the gradients of parameters that several stages hold (tied embeddings), so that their copies are updated alike and stay equal. Once a step,
/// behind the executor's run, or the last of several; a second call finds sums, and changes nothing. The terms are added from the last stage to the first;
/// stages of one rank share their tensor and so their gradient. One that has no gradient on any rank gets none, so that no optimizer moves it. Throws
/// ConfigError, on every rank, where it is frozen on some and not on others, where a wrapper keeps its gradient in parts, and where backward passes have added
/// to what was summed before. Traffic: of each such parameter, 8 bytes from each rank, and its bytes to the rank of its first stage and back, for each further
/// rank. Every rank of `ranks` calls it.
void sum_shared_gradients(const SplitModel& model, const schedules::Schedule& schedule, const comm::Group& ranks);

/// The ranks that hold a copy, that of the first stage first.
std::vector<int> holders_of(const tape::SharedParameter& shared, const schedules::Schedule& schedule);

}  // namespace tessera::pipeline
