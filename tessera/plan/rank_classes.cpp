#include "tessera/plan/rank_classes.h"

#include <algorithm>
#include <map>
#include <memory>
#include <numeric>

#include "tessera/comm/backends/record.h"
#include "tessera/comm/world.h"
#include "tessera/data_parallel/tree_schedule.h"
#include "tessera/layout/slice.h"
#include "tessera/mesh/mesh.h"
#include "tessera/train/compose.h"

namespace tessera::plan {

namespace {

using Elements = std::vector<int64_t>;

constexpr int kExactRanks = 8;

// What a rank does in the deterministic tree, peers left out: the levels it keeps, and in which order it adds, sends and receives.
std::vector<int64_t> tree_role(const TreeSchedule& schedule, int rank) {
  std::vector<int64_t> role;
  for (const auto& node : schedule.kept[static_cast<size_t>(rank)]) role.push_back(node.level);
  for (const auto& merge : schedule.merges)
    if (merge.owner == rank || merge.right_owner == rank) role.push_back(merge.owner == merge.right_owner ? -1 : merge.owner == rank ? -2 : -3);
  role.push_back(schedule.root_owner == rank ? -4 : -5);
  return role;
}

// By rank of the sharding group: what it holds of each parameter. One empty list where nothing is sharded.
std::vector<Elements> held_elements(const Config& config, const Mesh& mesh) {
  if (config.zero.stage == 0) return {{}};
  const Composition run = compose(config, mesh, at::kMeta);
  std::vector<Elements> held;
  for (int rank = 0; rank < run.shard.size(); ++rank) held.push_back(run.synchronizer->held_elements(rank));
  return held;
}

}  // namespace

std::vector<std::vector<int>> rank_classes(const Config& config, int world_size) {
  const auto recorder = std::make_shared<comm::Recorder>();
  const auto world = comm::World::dry(world_size, 0, recorder, comm::world_options(config.comm));
  const Mesh mesh(world, mesh_shape(config.mesh, config.zero.stage, world_size));
  const auto held = held_elements(config, mesh);
  const auto held_by = [&](int rank) -> const Elements& { return held.size() == 1 ? held.front() : held[static_cast<size_t>(mesh.rank(rank, "dp_shard"))]; };

  const int data_ranks = mesh.size(data_axes());
  const int64_t micro_batches = config.batch.global_size / config.batch.micro_size;
  const TreeSchedule schedule = config.run.deterministic ? make_tree_schedule(micro_batches, data_ranks) : TreeSchedule{};
  std::map<std::pair<std::vector<int64_t>, Elements>, std::vector<int>> classes;
  for (int rank = 0; rank < world_size; ++rank) {
    const int data_rank = mesh.rank(rank, data_axes());
    std::vector<int64_t> role{chunk(micro_batches, data_ranks, data_rank).second, mesh.rank(rank, "tp")};  // what tp cuts need not be equal
    if (config.run.deterministic) {
      const auto in_tree = tree_role(schedule, data_rank);
      role.insert(role.end(), in_tree.begin(), in_tree.end());
    }
    classes[{role, world_size <= kExactRanks ? held_by(rank) : Elements{}}].push_back(rank);
  }
  std::vector<std::vector<int>> result;
  for (auto& [key, ranks] : classes) result.push_back(std::move(ranks));
  std::ranges::sort(result);
  const auto total = [&](int rank) { return std::accumulate(held_by(rank).begin(), held_by(rank).end(), int64_t{0}); };
  for (auto& ranks : result) std::iter_swap(ranks.begin(), std::ranges::max_element(ranks, {}, total));
  return result;
}

}  // namespace tessera::plan
