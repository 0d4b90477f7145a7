#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include <nlohmann/json_fwd.hpp>

#include "tessera/pipeline/schedules/schedule.h"
#include "tessera/pipeline/schedules/simulate.h"

/// A schedule with the times of its actions: foretold, or as an engine measured them; how both are written; and what the measured ones say.
namespace tessera::schedules {

struct Timed {
  Schedule schedule{};
  Timeline timeline{};
  /// Of a measured one alone, at the same indices: when a rank asked for what an action takes from other ranks, and how much of its time was in collectives.
  std::vector<std::vector<double>> asked{}, collectives{};
  int64_t step = 0;  ///< of a measured one: which of the run,
  int rank = 0;      ///< and which rank of the world is rank 0 of this pipeline

  bool measured() const { return !asked.empty(); }
};

/// Keys: name, stages (ranks of the pipeline), micro_batches, rank_of_stage, then what measure() says, then actions (text) and timeline ([start, end]) of each
/// rank. Measured ones have step, rank, unit ("ms"), asked and collectives besides.
nlohmann::json to_json(const Timed& timed);

/// Reads it again; what measure() says is not read. Throws ConfigError with `origin` where it is none, or its schedule cannot be right (find_problem).
Timed timed_from_json(const nlohmann::json& json, const std::string& origin);

/// Of a run's folder (its timeline.jsonl), or of a file with a timeline in each line: the one of `step` and of the pipeline whose first rank is `rank`; where
/// these are not said, of the last step, of the lowest rank. Throws ConfigError where there is none, or the file is damaged before its last line.
std::filesystem::path timeline_file(const std::string& from);
Timed read_timeline(const std::string& from, const std::optional<int64_t>& step = {}, const std::optional<int>& rank = {});

/// What each stage's computations cost, by their mean: to foretell with (Costs::stages). A half that did not run alone is half a whole backward, and a whole
/// one that did not run is its two halves.
std::vector<StageCosts> costs_of(const Timed& timed);

/// From the end of an action until one that waits for its result on another rank begins: the median; 0 where none had to wait.
double message_time(const Timed& timed);

/// Both, to foretell with. Throws ConfigError where the forwards of a stage, or all backwards, took no time: spans that are empty measure nothing.
Costs measured_costs(const Timed& timed);

/// Where a rank's time went, in the unit of the timeline.
struct RankShare {
  double busy = 0;         ///< computing, collectives of other axes included
  double collectives = 0;  ///< of that
  double waited = 0;       ///< between its first and last action for what other ranks send
  double bubble = 0;       ///< idle share of the makespan of all ranks
};
std::vector<RankShare> shares_of(const Timed& timed);

}  // namespace tessera::schedules
