#include "tessera/plan/dry_routing.h"

#include <algorithm>
#include <map>
#include <utility>

#include "tessera/config/expert_rules.h"
#include "tessera/layout/slice.h"
#include "tessera/mesh/positions.h"
#include "tessera/mesh/roles.h"
#include "tessera/models/mixture.h"
#include "tessera/train/stepper.h"

namespace tessera::plan {

experts::DryRouting dry_routing(const Config& config, experts::DryLoad load, const Mesh& mesh, const data::LoaderOptions& loader) {
  experts::DryRouting routing{.load = load,
                              .alike = experts_have_alike(config.model),
                              .per_token = std::max<int64_t>(1, config.model.experts_per_token),
                              .capacity_factor = config.moe.capacity_factor};
  const MeshRoles roles = mesh_roles(config);
  const int layers = mesh.size(roles.layers);
  const bool apart = config.tensor.sequence_parallel && layers > 1;  // ranks that share layers route other positions each
  if (loader.columns.cut() || apart) {
    const data::MicroBatch micro = data::dry_batch(loader, 1, at::kMeta).micro_batches.front();
    routing.tokens = [=, rows = micro.rows, all = micro.seq_len, cut = micro.cut](int world_rank) {
      const int64_t own = cut ? cut->columns(mesh.rank(world_rank, roles.columns)) : all;
      return rows * (apart ? chunk(own, layers, mesh.rank(world_rank, roles.layers)).second : own);
    };
  }
  routing.part = [=](int world_rank) { return mesh.rank(world_rank, roles.layers); };
  return routing;
}

std::vector<int64_t> dealt_rows(const Config& config, const Mesh& mesh, experts::DryLoad load, int64_t documents) {
  const MeshShape& shape = mesh.shape();
  if (!deals_experts(config, shape) || config.mesh.ep * config.mesh.expert_tp == 1) return {};
  data::LoaderOptions loader = loader_options(config, mesh);
  loader.dry_documents = documents;
  const experts::DryRouting routing = dry_routing(config, load, mesh, loader);
  const MeshRoles roles = mesh_roles(config);
  const int parts = config.tensor.sequence_parallel ? 1 : mesh.size(roles.layers);
  const int64_t block = config.model.experts / config.mesh.ep;

  // Of each rank, with which set of others it exchanges rows, and which tokens it routes: ranks of one number the same, or as many.
  const auto [over, into] = expert_grid(config, shape);
  const std::vector<int> place = ranks_along(shape, over.names), beside = ranks_along(shape, axes_beside(over.names, shape));
  const std::vector<int> set_of_place = ranks_along(into, {"edp"}), block_of_place = ranks_along(into, {"ep"});
  const std::vector<int> tokens = ranks_along(shape, {roles.columns.names.front(), roles.layers.names.front()});
  const int sets = size_along(into, "edp");
  const auto set_of = [&](size_t rank) { return static_cast<size_t>(beside[rank] * sets + set_of_place[static_cast<size_t>(place[rank])]); };
  std::vector<std::vector<int>> members(place.size() / static_cast<size_t>(config.mesh.ep * config.mesh.expert_tp));  // of sets, by their tokens
  std::map<int, experts::DryRows> rows_of;                                                                            // of such tokens
  for (size_t rank = 0; rank < place.size(); ++rank) {
    members[set_of(rank)].push_back(tokens[rank]);
    if (rows_of.contains(tokens[rank])) continue;
    const int world_rank = static_cast<int>(rank);
    const int64_t all = router_options(config.model).places(routing.tokens ? routing.tokens(world_rank) : config.batch.micro_size * config.data.seq_len);
    const auto [begin, size] = chunk(all, parts, parts == 1 ? 0 : routing.part(world_rank));
    rows_of[tokens[rank]] = {.all = all, .begin = begin, .size = size};
  }

  const experts::DryRoutingScope assumed(routing);
  std::map<std::pair<int, int>, int64_t> sent;  // of such tokens to such a block of experts
  const auto sent_to = [&](int of, int to) {
    const auto [found, is_new] = sent.try_emplace({of, to});
    if (is_new) {
      const auto load = experts::dry_load(rows_of.at(of), config.model.experts, block, to);
      for (int64_t expert = block * to; expert < block * (to + 1); ++expert) found->second += load[static_cast<size_t>(expert)];
    }
    return found->second;
  };
  std::map<std::vector<int>, std::vector<int64_t>> known;  // by a set's members, what each of its blocks gets: there are few, however large the world
  std::vector<const std::vector<int64_t>*> of_set;
  for (auto& who : members) {
    std::ranges::sort(who);
    const auto [found, is_new] = known.try_emplace(who);
    for (int to = 0; is_new && to < config.mesh.ep; ++to) {
      int64_t all = 0;
      for (const int of : who) all += sent_to(of, to);
      found->second.push_back(all);
    }
    of_set.push_back(&found->second);
  }
  std::vector<int64_t> dealt(place.size());
  for (size_t rank = 0; rank < dealt.size(); ++rank) {
    dealt[rank] = of_set[set_of(rank)]->at(static_cast<size_t>(block_of_place[static_cast<size_t>(place[rank])]));
  }
  return dealt;
}

}  // namespace tessera::plan
