#pragma once

#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "tessera/pipeline/schedules/schedule.h"
#include "tessera/pipeline/schedules/simulate.h"
#include "tessera/plan/rank_clock.h"

namespace tessera::plan {

/// What a step takes, of all ranks.
struct StepTime {
  double seconds = 0;
  /// Of those, of the rank that decides:
  double computing = 0;          ///< its device runs operators
  double guessed = 0;            ///< of that, those of which nobody knows what they take (has_cost)
  double exposed = 0;            ///< it waits for collectives
  double asked = 0;              ///< it waits for the host
  double copied = 0;             ///< it waits for copies from or to the host
  double bubble = 0;             ///< it waits for other stages
  double tokens_per_second = 0;  ///< and device
  double model_flops = 0;        ///< a second and device
  double mfu = 0;                ///< of the peak of the type in which products are computed
  double hfu = 0;                ///< the same of the FLOPs that are run, those of recomputation included
};

/// A rank of a class, and where it stands along mesh.pp.
struct TimedClass {
  int pipeline_rank = 0;
  const RankTime* time = nullptr;
};

/// Without a pipeline, whose actions are empty then, the slowest class decides. With one, stages' actions cost what the slowest class of their rank took, the
/// schedule is simulated with them and with messages between its stages, and what ranks do before and behind it stands before and behind.
StepTime step_time(const std::vector<TimedClass>& classes, const schedules::Schedule& pipeline = {});

/// What the actions of `pipeline`, and its messages, cost by the slowest class of each of its ranks: seconds.
schedules::Costs pipeline_costs(const std::vector<TimedClass>& classes, const schedules::Schedule& pipeline);

nlohmann::json to_json(const StepTime& time);
std::string to_string(const StepTime& time);

}  // namespace tessera::plan
