#include "tessera/mesh/roles.h"

#include "tessera/config/config.h"

namespace tessera {

MeshRoles mesh_roles(const Config& config) {
  const bool sharded = config.zero.stage > 0;
  const Axes batch{"dp_replicate", "dp_shard"}, tokens{"dp_replicate", "dp_shard", "cp"};
  return {.batch = batch,
          .columns = "cp",
          .tokens = tokens,
          .gradients = config.run.deterministic ? batch : tokens,
          .replicate = "dp_replicate",
          .shard = {"dp_shard", "cp"},
          .layers = "tp",
          .stages = "pp",
          .cut = sharded ? Axes{"dp_shard", "cp", "tp"} : Axes("tp"),
          .tied = sharded ? Axes{"dp_shard", "cp", "pp"} : Axes("pp"),
          .elements = sharded ? Axes{"dp_shard", "cp", "pp", "tp"} : Axes{"pp", "tp"},
          .world = {"dp_replicate", "dp_shard", "pp", "cp", "tp"}};
}

Mesh expert_mesh(const Config& config, const Mesh& mesh) {
  const Axes regrouped = {"dp_shard", "cp", "tp"};
  return mesh.regrouped(regrouped, {{"edp", mesh.size(regrouped) / config.mesh.ep}, {"ep", config.mesh.ep}});
}

}  // namespace tessera
