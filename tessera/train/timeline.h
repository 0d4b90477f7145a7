#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "tessera/comm/group.h"
#include "tessera/pipeline/schedules/timed.h"
#include "tessera/pipeline/step_times.h"

namespace tessera {

/// What every pipeline of the world did in a step, on rank 0 of the world, in milliseconds from the first action of each, by one clock (comm::clock_offset);
/// null on other ranks. `pipeline`: the ranks that hold this rank's other stages. Reads `mine`. Collective over the world.
std::shared_ptr<const std::vector<schedules::Timed>> gather_timelines(const comm::Group& world, const comm::Group& pipeline, pipeline::StepTimes& mine,
                                                                      int64_t step);

}  // namespace tessera
