#include "tessera/mesh/roles.h"

#include "tessera/config/config.h"

namespace tessera {

MeshRoles mesh_roles(const Config& config) {
  const bool sharded = config.zero.stage > 0;
  const Axes batch{"dp_replicate", "dp_shard"}, tokens{"dp_replicate", "dp_shard", "cp"};
  return {.batch = batch,
          .columns = "cp",
          .tokens = tokens,
          .routes = config.tensor.sequence_parallel ? Axes{"cp", "tp"} : Axes("cp"),
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

int data_ranks(const Config& config, int world_size) { return size_along(mesh_shape(config.mesh, config.zero.stage, world_size), mesh_roles(config).tokens); }

bool deals_experts(const Config& config, const MeshShape& shape) {
  return config.model.experts > 0 && (config.mesh.ep > 1 || config.mesh.expert_tp > 1 || size_along(shape, "tp") > 1);
}

bool deals_experts_over_replicas(const Config& config, const MeshShape& shape) {
  const bool deals = config.model.experts > 0 && config.mesh.ep * config.mesh.expert_tp > 1;
  return deals && config.run.deterministic && config.zero.stage == 0 && size_along(shape, {"cp", "tp"}) == 1;
}

ExpertGrid expert_grid(const Config& config, const MeshShape& shape) {
  const Axes over = config.zero.stage > 0 ? Axes{"dp_shard", "cp", "tp"} : deals_experts_over_replicas(config, shape) ? Axes("dp_replicate") : Axes("tp");
  const int apart = config.mesh.ep * config.mesh.expert_tp;
  return {.over = over, .into = {{"edp", size_along(shape, over) / apart}, {"ep", config.mesh.ep}, {"expert_tp", config.mesh.expert_tp}}};
}

Mesh expert_mesh(const Config& config, const Mesh& mesh) {
  const auto [over, into] = expert_grid(config, mesh.shape());
  return mesh.regrouped(over, into);
}

}  // namespace tessera
