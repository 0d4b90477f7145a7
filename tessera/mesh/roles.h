#pragma once

#include "tessera/mesh/mesh.h"

namespace tessera {

struct Config;  // tessera/config/config.h

/// What the axes of a mesh are for, made once from the configuration: whoever needs a group or a size asks for a role, and an axis that is new takes its part
/// in some of them here.
struct MeshRoles {
  Axes batch;      ///< ranks that are dealt other samples, and whose gradients are summed
  Axes replicate;  ///< of those, ranks that hold the same part of what is sharded
  Axes shard;      ///< of those, ranks that hold other parts
  Axes layers;     ///< ranks that compute the same samples, each a part of every layer
  Axes stages;     ///< ranks that compute the same samples one after the other, each some of the layers
  Axes samples;    ///< of one stage, ranks that work on the same samples in any way, and so have the same losses
  Axes cut;        ///< of one stage, ranks that hold other elements of the gradients of its layers
  Axes tied;       ///< of ranks that hold some of the first stage, or of the last: where what both use is summed
  Axes elements;   ///< ranks that hold other elements of any gradients: what a norm sums over
  Axes world;      ///< all ranks
};

MeshRoles mesh_roles(const Config& config);

/// The same ranks numbered anew for experts (mesh.ep): those of dp_shard x cp x tp are "edp" x "ep", neighbours along "ep". Ranks along "ep" hold different
/// experts, those along "edp" the same, which they shard; the other axes stay.
Mesh expert_mesh(const Config& config, const Mesh& mesh);

}  // namespace tessera
