#pragma once

#include "tessera/mesh/mesh.h"

namespace tessera {

struct Config;  // tessera/config/config.h

/// What the axes of a mesh are for, made once from the configuration: whoever needs a group or a size asks for a role, and an axis that is new takes its part
/// in some of them here.
struct MeshRoles {
  Axes batch;      ///< ranks that are dealt other samples
  Axes columns;    ///< ranks that are dealt the same samples, and of each other columns
  Axes tokens;     ///< both: ranks that compute other tokens with the same layers, whose losses and gradients are terms of one sum
  Axes routes;     ///< ranks that route other tokens of the same samples: a router's terms are of all their tokens
  Axes gradients;  ///< of those, ranks whose gradients data parallelism sums; what is left is summed over `columns` when it has (run.deterministic)
  Axes replicate;  ///< of `tokens`, ranks that hold the same part of what is sharded
  Axes shard;      ///< of `tokens`, ranks that hold other parts
  Axes layers;     ///< ranks that compute the same tokens, each a part of every layer, and so have the same losses
  Axes stages;     ///< ranks that compute the same tokens one after the other, each some of the layers
  Axes cut;        ///< of one stage, ranks that hold other elements of the gradients of its layers
  Axes tied;       ///< of ranks that hold some of the first stage, or of the last: where what both use is summed
  Axes elements;   ///< ranks that hold other elements of any gradients: what a norm sums over
  Axes world;      ///< all ranks
};

MeshRoles mesh_roles(const Config& config);

/// Ranks over which gradients are summed (`tokens`).
int data_ranks(const Config& config, int world_size);

/// Whether it is data ranks that experts are dealt over though nothing is sharded: their gradients are summed micro-batch by micro-batch all the same.
bool deals_experts_over_replicas(const Config& config, const MeshShape& shape);

/// Whether experts are dealt over other ranks than the rest of the model.
bool deals_experts(const Config& config, const MeshShape& shape);

/// The ranks of `over` numbered anew for experts (mesh.ep, mesh.expert_tp), "edp" x "ep" x "expert_tp", neighbours along the last: ranks along "ep" hold
/// different experts, those along "expert_tp" different rows of the same, those along "edp" the same rows, which they shard; the other axes stay. `over` is
/// dp_shard x cp x tp; where nothing is sharded (zero.stage = 0) tp alone, for then the other ranks are replicas of a parameter whatever it is, but for
/// run.deterministic on models whose layers and sequences are whole: dp_replicate.
struct ExpertGrid {
  Axes over;
  MeshShape into;
};
ExpertGrid expert_grid(const Config& config, const MeshShape& shape);
Mesh expert_mesh(const Config& config, const Mesh& mesh);

}  // namespace tessera
