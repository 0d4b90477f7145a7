#pragma once

#include <cstdint>
#include <functional>
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

/// The order of every rank's actions in a step of so many micro-batches of each data rank, those that fill up counted.
using ScheduleMaker = std::function<schedules::Schedule(int micro_batches)>;

/// What [pipeline] says; on one rank one micro-batch after the other. A file is read, and stages are counted for costs (stage_costs.h), here and once. Throws
/// ConfigError, and so does what it gives, for a number of micro-batches, chunks or ranks that the schedule cannot take, with the rule and the next value, for
/// a file that is none or is wrong, and for a schedule that this build cannot train with.
ScheduleMaker schedule_maker(const Config& config, int ranks);

/// Whether pipeline.schedule is a path.
bool is_schedule_file(const PipelineConfig& config);

/// Throws ConfigError for a schedule that does not exist, or whose ranks or chunks are not those of [mesh] and [pipeline], and where pipeline.split does not
/// fit the model: what can be refused of stages in training and in reading.
PipelineLayout pipeline_layout(const Config& config, int ranks);

/// Everything that can be refused of mesh.pp in training, before any process group exists. Throws ConfigError.
void check_pipeline(const Config& config, const MeshShape& axes);

}  // namespace tessera
