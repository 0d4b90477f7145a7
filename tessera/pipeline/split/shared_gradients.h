#pragma once

#include <vector>

#include "tessera/comm/group.h"
#include "tessera/pipeline/schedules/schedule.h"
#include "tessera/pipeline/split/split.h"

namespace tessera::pipeline {

/// Sums, in place, the gradients of parameters that several stages hold (tied embeddings), so that their copies are updated alike and stay equal. Once a step,
/// behind the executor's run, or the last of several, and behind what wrappers do; a second call finds sums, and changes nothing. The terms are what is in
/// grad() of what is updated (the parameter, or this rank's part of it under ShardedDataParallel and fully_shard), added from the last stage's to the first
/// one's; stages of one rank share their tensor and so their gradient. One that has no gradient on any rank gets none, so that no optimizer moves it.
///
/// Where wrappers keep gradients in parts, `everyone` are the ranks of the pipeline with those over which the stages are cut, and no replicas (of a mesh
/// mesh[{"dp", "pp"}]); the parts of two stages may lie at different offsets. Throws ConfigError, on every rank, where a parameter is frozen on some and not on
/// others, where the ranks do not hold all of it, and where backward passes have added to what was summed before (of what is updated in parts neither a second
/// call nor that is noticed: call it once a step). Traffic: as TiedCopies, its table every time. Every rank of `pipeline`, and of `everyone`, calls it.
void sum_shared_gradients(const SplitModel& model, const schedules::Schedule& schedule, const comm::Group& pipeline, const comm::Group& everyone = {});

/// The ranks that hold a copy, that of the first stage first.
std::vector<int> holders_of(const tape::SharedParameter& shared, const schedules::Schedule& schedule);

}  // namespace tessera::pipeline
