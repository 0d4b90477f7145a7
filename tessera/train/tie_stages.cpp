#include "tessera/train/tie_stages.h"

#include <algorithm>
#include <array>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "tessera/comm/backends/record.h"
#include "tessera/core/error.h"
#include "tessera/mesh/roles.h"
#include "tessera/nn/names.h"
#include "tessera/nn/sharing.h"
#include "tessera/pipeline/tied.h"
#include "tessera/train/pipeline_layout.h"

namespace tessera {
namespace {

using pipeline::TiedCopies;

/// The rank of the pipeline that holds the first stage, and that of the last one.
std::array<int, 2> ends_of(const Composition& run) { return {run.rank_of_stage.front(), run.rank_of_stage.back()}; }

std::vector<TiedCopies::Copy> copies_of(const Composition& run) {
  std::vector<TiedCopies::Copy> copies;
  for (const auto& parameter : run.synchronizer->updated()) {
    if (nn::slice_of(parameter.tensor).name != kTiedWeight) continue;
    const bool first = ends_of(run)[0] == run.pipeline.rank() && !nn::follows(nn::updated_for(parameter.tensor));
    copies.push_back({.holder = first ? 0 : 1, .tensor = parameter.tensor});
  }
  return copies;
}

/// The mesh of the rank that has this one's place on all axes but the pipeline's, in a world of which it is the only one.
Mesh mesh_at(const Config& config, const Mesh& mesh, int pipeline_rank) {
  std::vector<int> place = mesh.coordinates();
  int size = 1;
  for (size_t axis = 0; axis < place.size(); ++axis) {
    size *= mesh.shape()[axis].second;
    if (mesh.shape()[axis].first == mesh_roles(config).stages.names.front()) place[axis] = pipeline_rank;
  }
  const auto world = comm::World::dry(size, mesh.world_rank(place), std::make_shared<comm::Recorder>(), comm::world_options(config.comm));
  return {world, mesh.shape()};
}

/// Of each holder, what each rank that its slices are cut over has.
using Slices = std::array<std::vector<Slice>, 2>;

void add_slices(const Mesh& mesh, const Axes& shard, const Composition& end, Slices& slices) {
  for (const auto& [holder, tensor] : copies_of(end)) {
    for (int rank = 0; rank < mesh.size(shard); ++rank) slices[static_cast<size_t>(holder)].push_back(end.synchronizer->slice_on(rank, tensor));
  }
}

TiedCopies::Answer answer_of(const Config& config, const Mesh& mesh, const Composition& run, const ComposeEnd& compose_end) {
  const MeshRoles roles = mesh_roles(config);
  const auto ends = ends_of(run);
  Slices slices;
  add_slices(mesh, roles.shard, run, slices);
  for (const int end : ends) {
    if (end != run.pipeline.rank()) add_slices(mesh, roles.shard, compose_end(mesh_at(config, mesh, end)), slices);
  }
  return [=, members = mesh.members(roles.tied), slices = std::move(slices)](int rank, int holder) -> std::optional<Slice> {
    const int world_rank = members[static_cast<size_t>(rank)];
    const auto at = static_cast<size_t>(holder);
    if (mesh.rank(world_rank, roles.stages) != ends[at]) return std::nullopt;
    return slices[at].at(static_cast<size_t>(mesh.rank(world_rank, roles.shard)));
  };
}

}  // namespace

void tie_stages(const Config& config, const Mesh& mesh, Composition& run, const ComposeEnd& compose_end) {
  if (run.parts.empty() || !config.model.tie_embeddings) return;
  const auto ends = ends_of(run);
  std::vector<TiedCopies::Copy> copies = copies_of(run);
  for (const auto& [holder, tensor] : copies) {
    const bool counted_elsewhere = holder == 1 && ends[0] != ends[1];
    if (counted_elsewhere) nn::add_sharing(nn::updated_for(tensor), {.axis = "pipeline.tied", .rank = 1, .first = 0, .holders = 2});
  }
  const Axes axes = mesh_roles(config).tied;
  pipeline::Channels ranks = mesh[axes];
  // In the midst of a step its messages meet those of the schedule, with which they are in no order.
  if (updates_within_steps(config, run.pipeline.size())) ranks = {mesh.another(axes, "tied"), mesh.another(axes, "tied.back"), {}};
  const bool dry = run.device.is_meta() && !copies.empty();
  run.tied.emplace(std::move(ranks), /*holders=*/2, std::move(copies), /*last_follows=*/ends[0] == ends[1],
                   dry ? answer_of(config, mesh, run, compose_end) : TiedCopies::Answer());
}

}  // namespace tessera
