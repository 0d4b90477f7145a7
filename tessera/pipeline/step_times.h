#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <c10/core/Device.h>

#include "tessera/pipeline/schedules/schedule.h"

namespace tessera::pipeline {

/// When a rank did one thing, in seconds of its steady clock.
struct Lap {
  schedules::Action action{};
  double asked = 0;           ///< for what other ranks send it: what came before is done, and on its way
  double start = 0, end = 0;  ///< of computing it, with what is around it (ExecutorOptions::around)
  double collectives = 0;     ///< seconds of that inside collectives, of other axes than the pipeline's
};

/// What one rank did in one step, as an executor noted it: four readings of the clock an action. A device is not asked in the midst of a step: there an action
/// leaves three events on the stream that computes, and two around each wait for a collective; its lap has no times before read().
struct StepTimes {
  std::string schedule{};
  int micro_batches = 0;
  std::vector<int> rank_of{};
  std::vector<Lap> laps{};  ///< in their order; the halves of an overlap each have their own

  struct Events;
  std::vector<std::shared_ptr<Events>> events{};  ///< of each lap, on a device; until read()

  /// After the step: gives laps of a device their times, behind a wait of the host for what that device was asked for. Nothing on the CPU.
  void read();
};

/// Notes one action, which is asked for when this is made.
class LapTaker {
 public:
  LapTaker(StepTimes& times, const schedules::Action& action, at::Device device);
  /// Calls `body`, which computes it.
  void compute(const std::function<void()>& body);

 private:
  Lap& lap_;
  std::shared_ptr<StepTimes::Events> events_;  ///< null on the CPU
};

/// The clock of laps.
double lap_clock();

}  // namespace tessera::pipeline
