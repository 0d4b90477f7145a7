#pragma once

#include <compare>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "tessera/config/config.h"
#include "tessera/core/events.h"
#include "tessera/mesh/mesh.h"
#include "tessera/mesh/roles.h"
#include "tessera/plan/pipeline_plan.h"
#include "tessera/plan/rehearsal.h"

namespace tessera::plan {

/// Of the ranks of a pipeline that are neither first nor last, and hold neither end of the model, what tells those apart that do not do the same.
struct StageKind {
  int beside = 0;                    ///< which rank among those of its stage
  std::vector<int64_t> flops{};      ///< of its stages, in millionths of the model's
  std::vector<std::string> links{};  ///< of its stages, whatever their numbers
  auto operator<=>(const StageKind&) const = default;
};

class StageKinds {
 public:
  StageKinds(const PipelinePlan& pipeline, const MeshShape& shape, const Axes& stages);

  int pipeline_rank(int rank) const { return stage_[static_cast<size_t>(rank)]; }
  std::optional<StageKind> operator()(int rank) const;

 private:
  const PipelinePlan& pipeline_;
  int last_;
  std::vector<int> stage_, beside_;  ///< of each rank
};

/// Whether stages with as many layers do the same: no setting names modules, or counts them.
bool treats_layers_alike(const Config& config);

/// What the rank with stages `from` does, by the names of stages and crossings of one that holds `to`. The peers are those of the first.
std::vector<pipeline::Leg> renamed_legs(std::vector<pipeline::Leg> legs, const std::vector<int>& from, const std::vector<int>& to);

/// Gives the messages between stages in a step's events, which are of a rank that does the same, the peers and tags that `legs` of pipeline rank `rank` say.
/// False, and nothing done, where they are not those.
bool readdress(Events& events, const std::vector<pipeline::Leg>& legs, int rank, int stages, const std::vector<std::string>& channels);

}  // namespace tessera::plan
