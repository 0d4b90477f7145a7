#pragma once

#include <vector>

#include "tessera/pipeline/schedules/schedule.h"

namespace tessera::schedules {

/// What one stage's actions cost where each has its own cost, as measured.
struct StageCosts {
  double forward = 1;
  double backward = 2;  ///< whole
  double backward_input = 1;
  double backward_weight = 1;
  double update = 0;  ///< the optimizer's, in the midst of an asynchronous schedule
};

/// What the actions of one stage cost, in any one unit of time. Where a rank has several chunks, that of one chunk.
struct Costs {
  double forward = 1;
  double backward_input = 1;
  double backward_weight = 1;        ///< a full backward costs both
  double communication = 0;          ///< from the end of an action until its result is on another rank, which computes meanwhile
  double overlap = 0;                ///< a forward and a full backward that run together; 0: what they cost one after the other
  std::vector<double> scale{};       ///< of each stage's computations; empty: 1
  std::vector<StageCosts> stages{};  ///< of each stage, in place of what stands above, but for `communication`; empty: all alike
};

/// How long it takes of its rank: 0 for messages, gathers and reductions.
double duration(const Action& action, const Costs& costs);

struct Span {
  double start = 0, end = 0;
};

/// When each action of each rank ran, at the same indices: foretold, or measured by an engine.
using Timeline = std::vector<std::vector<Span>>;

/// Every rank carries out its list in order, each action as soon as what it needs is there. Sends and receives take no time of a rank. Throws InternalError
/// where the schedule cannot run to its end: check it first.
Timeline simulate(const Schedule& schedule, const Costs& costs = {});

/// What a timeline says of a schedule. Updates that take time are no idle time.
struct Measures {
  double makespan = 0;                     ///< from the first start to the last end, of all ranks
  double bubble_fraction = 0;              ///< idle share of the makespan, over all ranks
  double bubble_over_ideal = 0;            ///< idle time over busy time
  double span_bubble_rate = 0;             ///< (c - busy)/c, c the longest span of a rank from its first start to its last end: what arXiv:2401.10241 prints
  std::vector<double> peak_activations{};  ///< of each rank, in micro-batches of its whole share: a chunk counts 1/v
  std::vector<int> weight_versions{};      ///< of each rank, of the stage that needs most: how many it has to hold at once; 1 where it never updates
};
Measures measure(const Schedule& schedule, const Timeline& timeline);

}  // namespace tessera::schedules
