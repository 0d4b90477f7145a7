#pragma once

#include <string>
#include <vector>

#include "tessera/pipeline/schedules/schedule.h"

namespace tessera::pipeline {

/// When a rank did one thing, in seconds of its steady clock.
struct Lap {
  schedules::Action action{};
  double asked = 0;           ///< for what other ranks send it: what came before is done, and on its way
  double start = 0, end = 0;  ///< of computing it, with what is around it (ExecutorOptions::around)
  double collectives = 0;     ///< seconds of that inside collectives, of other axes than the pipeline's
};

/// What one rank did in one step, as an executor noted it: four readings of the clock an action.
struct StepTimes {
  std::string schedule{};
  int micro_batches = 0;
  std::vector<int> rank_of{};
  std::vector<Lap> laps{};  ///< in their order; the halves of an overlap each have their own
};

/// The clock of laps.
double lap_clock();

}  // namespace tessera::pipeline
