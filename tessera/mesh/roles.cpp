#include "tessera/mesh/roles.h"

#include "tessera/config/config.h"

namespace tessera {

MeshRoles mesh_roles(const Config& config) {
  return {.batch = {"dp_replicate", "dp_shard"},
          .replicate = "dp_replicate",
          .shard = "dp_shard",
          .layers = "tp",
          .stages = "pp",
          .samples = {"cp", "tp"},
          .cut = config.zero.stage > 0 ? Axes{"dp_shard", "tp"} : Axes("tp"),
          .tied = config.zero.stage > 0 ? Axes{"dp_shard", "pp"} : Axes("pp"),
          .elements = config.zero.stage > 0 ? Axes{"dp_shard", "pp", "tp"} : Axes{"pp", "tp"},
          .world = {"dp_replicate", "dp_shard", "pp", "cp", "tp"}};
}

Mesh expert_mesh(const Config& config, const Mesh& mesh) {
  const Axes regrouped = {"dp_shard", "cp", "tp"};
  return mesh.regrouped(regrouped, {{"edp", mesh.size(regrouped) / config.mesh.ep}, {"ep", config.mesh.ep}});
}

}  // namespace tessera
