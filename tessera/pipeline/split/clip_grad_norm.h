#pragma once

#include <ATen/core/Tensor.h>

#include "tessera/comm/group.h"
#include "tessera/pipeline/schedules/schedule.h"
#include "tessera/pipeline/split/split.h"

namespace tessera::pipeline {

/// tessera::clip_grad_norm of a model in stages: clips the gradients of this rank's stages by the norm over all of them, a parameter that several stages share
/// counted once, so that its copies stay equal. Between sum_shared_gradients and the optimizer's step; each stage may have a wrapper of its own, whose parts
/// meet first. Returns the norm before clipping, an fp64 scalar, the same bits on every rank of the pipeline. Every rank of `ranks` calls it. Traffic: an
/// all-reduce of one number, besides those of the wrappers. Throws what tessera::clip_grad_norm throws.
at::Tensor clip_grad_norm(const SplitModel& model, const schedules::Schedule& schedule, const comm::Group& ranks, double max_norm);

}  // namespace tessera::pipeline
