#pragma once

#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "tessera/config/config.h"
#include "tessera/pipeline/schedules/schedule.h"

namespace tessera::plan {

/// What a plan says of a pipeline as a whole: its schedule simulated, each stage's actions costing what their FLOPs say (or pipeline.costs), messages nothing
/// unless pipeline.costs says otherwise.
struct PipelinePlan {
  struct Stage {
    int rank = 0;            ///< of mesh.pp
    std::string links{};     ///< "embed_tokens, layers.0-2"
    double flops_share = 0;  ///< of the model's, a step long
    double model_share = 0;  ///< of the model's FLOPs: without what recompute runs again
  };
  std::string schedule{};
  schedules::Schedule actions{};  ///< of every rank; empty where there is one stage
  int micro_batches = 0;          ///< of a data rank, those that fill up counted
  double bubble_fraction = 0;     ///< idle share of a step's forwards and backwards, over all ranks
  std::vector<Stage> stages{};
  std::vector<double> kept_alive{};  ///< of each rank of mesh.pp: micro-batches whose activations it holds at most, in micro-batches of its whole share

  std::vector<int> stages_of(int rank) const;
  /// Of the model's FLOPs, what a rank's stages have.
  double model_share_of(int rank) const;
};

/// One stage of one rank where mesh.pp is 1. Cost: milliseconds a layer. Throws ConfigError for a schedule or a split
/// that does not fit.
PipelinePlan plan_pipeline(const Config& config, int world);

/// `schedule micro_batches stages`.
nlohmann::json to_json(const PipelinePlan& plan);

/// A table for people; empty where there is one stage.
std::string to_string(const PipelinePlan& plan);

/// "stages 0 and 3, activations of at most 2.5 micro-batches"
std::string holding_of(const PipelinePlan& plan, int rank);

}  // namespace tessera::plan
