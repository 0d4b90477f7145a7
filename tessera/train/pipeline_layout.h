#pragma once

#include <cstdint>
#include <vector>

#include "tessera/config/config.h"
#include "tessera/mesh/mesh.h"
#include "tessera/models/model.h"
#include "tessera/pipeline/schedules/schedule.h"

namespace tessera {

/// How a configuration deals a model over the ranks of mesh.pp.
struct PipelineLayout {
  std::vector<ChainRange> links;  ///< of each stage
  std::vector<int> rank_of;       ///< which holds it

  int stages() const { return static_cast<int>(links.size()); }
  std::vector<int> stages_of(int rank) const;
};

/// The order of every rank's actions in a step, as [pipeline] says it; on one rank one micro-batch after the other. Throws ConfigError for a number of
/// micro-batches or of chunks that the schedule cannot take, with the rule and the next value, and for one that this build cannot train with.
schedules::Schedule make_schedule(const Config& config, int ranks, int micro_batches);

/// Throws ConfigError where pipeline.split does not fit the model.
PipelineLayout pipeline_layout(const Config& config, int ranks);

/// What can be refused of stages that are dealt over `ranks`, in training and in reading. Throws ConfigError.
void check_stages(const Config& config, int ranks);

/// Everything that can be refused of mesh.pp in training, before any process group exists. Throws ConfigError.
void check_pipeline(const Config& config, const MeshShape& axes);

}  // namespace tessera
