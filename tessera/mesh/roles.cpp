#include "tessera/mesh/roles.h"

#include "tessera/config/config.h"

namespace tessera {

MeshRoles mesh_roles(const Config& config) {
  return {.batch = {"dp_replicate", "dp_shard"},
          .replicate = "dp_replicate",
          .shard = "dp_shard",
          .layers = "tp",
          .samples = {"pp", "cp", "tp"},
          .elements = config.zero.stage > 0 ? Axes{"dp_shard", "tp"} : Axes("tp"),
          .world = {"dp_replicate", "dp_shard", "pp", "cp", "tp"}};
}

}  // namespace tessera
