#include "tessera/plan/rank_classes.h"

#include <algorithm>
#include <functional>
#include <map>
#include <memory>
#include <numeric>
#include <set>
#include <tuple>

#include "tessera/comm/backends/record.h"
#include "tessera/comm/world.h"
#include "tessera/data/loader.h"
#include "tessera/data_parallel/tree_schedule.h"
#include "tessera/layout/slice.h"
#include "tessera/mesh/mesh.h"
#include "tessera/mesh/positions.h"
#include "tessera/mesh/roles.h"
#include "tessera/nn/attention_tiles.h"
#include "tessera/nn/dry_documents.h"
#include "tessera/plan/alike_stages.h"
#include "tessera/plan/dry_routing.h"
#include "tessera/train/compose.h"

// A dry run of each rank of a large world would repeat the same step with other peers. What can differ between ranks is little and is known beforehand: the
// share of micro-batches, the role in the tree, the rank in tensor parallelism, the part of a sequence in context parallelism, the rows of the experts, the
// elements of the shards. The last would make nearly every rank a class of its own for a few rows' difference; beyond 8 ranks the one that holds most stands
// for the others. What experts get may be all or nothing, and may be many amounts: of those that are near each other the most stands for all.

namespace tessera::plan {

namespace {

using Elements = std::vector<int64_t>;

constexpr int kNearRows = 16;        // amounts of rows less than this part of the most apart are one, so that there are 17 at the most
constexpr int kWeighedRanks = 4096;  // of a larger sharding group, those after them hold as much, give or take a row

// By data rank, what it does in the deterministic tree, peers left out: the levels it keeps, and in which order it adds, sends and receives.
std::vector<std::vector<int64_t>> tree_roles(const TreeSchedule& schedule) {
  std::vector<std::vector<int64_t>> roles(schedule.kept.size());
  const auto role_of = [&](int rank) -> std::vector<int64_t>& { return roles[static_cast<size_t>(rank)]; };
  for (size_t rank = 0; rank < roles.size(); ++rank) {
    for (const auto& node : schedule.kept[rank]) roles[rank].push_back(node.level);
  }
  for (const auto& merge : schedule.merges) {
    role_of(merge.owner).push_back(merge.owner == merge.right_owner ? -1 : -2);
    if (merge.owner != merge.right_owner) role_of(merge.right_owner).push_back(-3);
  }
  for (size_t rank = 0; rank < roles.size(); ++rank) roles[rank].push_back(schedule.root_owner == static_cast<int>(rank) ? -4 : -5);
  return roles;
}

/// The same with what it does in the tree of experts, to which `sources` neighbours bring their micro-batches.
std::vector<std::vector<int64_t>> tree_roles(int64_t micro_batches, int ranks, int sources) {
  auto roles = tree_roles(make_tree_schedule(micro_batches, ranks));
  if (sources == 1) return roles;
  const auto of_experts = tree_roles(make_tree_schedule(micro_batches, ranks / sources, sources));
  for (size_t rank = 0; rank < roles.size(); ++rank) {
    const size_t holder = rank / static_cast<size_t>(sources);
    for (int source = 0; source < sources; ++source) roles[rank].push_back(chunk(micro_batches, ranks, static_cast<int>(holder) * sources + source).second);
    roles[rank].insert(roles[rank].end(), of_experts[holder].begin(), of_experts[holder].end());
  }
  return roles;
}

/// Whether the ranks that layers are cut over all hold as much of each, and of the columns between them. Those of a ring are told apart, by their neighbours.
bool cut_evenly(const Config& config, int ranks) {
  const auto& model = config.model;
  const auto lengths = {model.heads, model.kv_heads.value_or(model.heads), model.ffn_dim.value_or(1), model.vocab_size, config.data.seq_len};
  return !config.tensor.overlap && std::ranges::all_of(lengths, [&](int64_t length) { return length % ranks == 0; });
}

/// What tells a rank's step from another's: the classes go in this order.
struct RankTraits {
  int64_t micro_batches;
  int stage;
  int tensor_rank;            ///< 0 where ranks that layers are cut over are alike
  int column_kind;            ///< column_kinds()
  std::vector<int64_t> role;  ///< in the deterministic tree; empty without one
  Elements elements;          ///< that it holds of what is sharded; empty where that makes no class
  int64_t rows;               ///< of its experts; what stands for them

  auto operator<=>(const RankTraits&) const = default;
};

/// What the ranks of the sharding group hold of the parameters.
struct Held {
  std::vector<Elements> of_each;  ///< by rank, where few ranks are told apart
  std::vector<int64_t> total;     ///< by rank, of the first ranks
};

/// As rank `rank` of the world knows it: of its stage, and its part of the layers.
Held held_elements(const Config& config, int world_size, int rank, bool apart) {
  if (config.zero.stage == 0) return {};
  const auto world = comm::World::dry(world_size, rank, std::make_shared<comm::Recorder>(), comm::world_options(config.comm));
  const Mesh mesh(world, mesh_shape(config.mesh, config.zero.stage, world_size));
  const Composition run = compose(config, mesh, at::kMeta);
  Held held;
  for (int rank = 0; rank < std::min(run.shard.size(), kWeighedRanks); ++rank) {
    Elements elements = run.synchronizer->held_elements(rank);
    held.total.push_back(std::accumulate(elements.begin(), elements.end(), int64_t{0}));
    if (!apart) continue;
    if (run.tied) {  // parts of as many elements may meet others of the other end
      const int world_rank = mesh.members(mesh_roles(config).shard)[static_cast<size_t>(rank)];
      std::ranges::copy(run.tied->exchanged_by(mesh.rank(world_rank, mesh_roles(config).tied)), std::back_inserter(elements));
    }
    held.of_each.push_back(std::move(elements));
  }
  return held;
}

/// Of each rank that sequences are cut over, a number that those share whose tensors have the same shapes: as many columns, and the same tiles of attention;
/// `in_order`: in the order in which its method meets them, and as large as it makes them, since what else is held at the time is of that order.
std::vector<int> column_kinds(const Config& config, int ranks, int64_t documents, bool in_order) {
  std::vector<int> kinds(static_cast<size_t>(ranks));
  if (ranks == 1) return kinds;
  const bool exchanges = config.context.method == "ulysses" || config.context.method == "ulysses_ring";
  const bool gathers = config.context.method == "all_gather";
  const int64_t keys = config.model.kv_heads.value_or(config.model.heads);
  const bool rings = config.context.method == "ulysses_ring";  // of groups that hold all heads, each of other columns
  const bool heads_differ = exchanges && (config.model.heads % ranks != 0 || (keys % ranks != 0 && ranks % keys != 0) || config.mesh.tp != 1);
  const bool packed = config.data.documents != "none";
  const CutRule rule = column_rule(config, ranks);
  const std::vector<int64_t> lengths = data::dry_documents({.seq_len = config.data.seq_len,
                                                            .micro_size = packed ? config.batch.micro_size : 1,
                                                            .columns = {.rule = rule, .ranks = ranks},
                                                            .packed = packed,
                                                            .dry_documents = documents});
  const SequenceCut cut = rule(lengths, ranks);
  const nn::DryDocuments known_lengths(lengths);
  const std::vector<int64_t> ids = nn::DryDocuments::ids(1, cut.length);
  const auto columns_of = [&](const std::vector<ColumnRun>& runs) {
    std::vector<int64_t> positions, of_columns;
    for (const auto& [begin, size] : runs) {
      for (int64_t position = begin; position < begin + size; ++position) {
        positions.push_back(position);
        of_columns.push_back(ids[static_cast<size_t>(position)]);
      }
    }
    return nn::AttentionColumns::of(positions, of_columns);
  };
  using Shape = std::tuple<int64_t, int64_t, nn::TileForm, int64_t>;
  std::map<std::tuple<int64_t, int, std::vector<Shape>>, int> known;
  for (int rank = 0; rank < ranks; ++rank) {
    std::vector<Shape> tiles;
    const auto meet = [&](const std::vector<ColumnRun>& keys) {
      const auto queries = columns_of(cut.runs[static_cast<size_t>(rank)]);
      for (const nn::AttentionTile& tile : nn::attention_tiles(queries, columns_of(keys), {.window = config.model.sliding_window})) {
        tiles.emplace_back(tile.queries.size, tile.keys.size, tile.form, tile.times);
      }
      if (in_order) tiles.emplace_back();  // the end of a step
    };
    if (in_order && gathers) {
      meet({{0, cut.length}});
    } else if (!exchanges) {  // whose cores see all columns, alike
      for (int step = 0; step < ranks; ++step) meet(cut.runs[static_cast<size_t>((rank - step + ranks) % ranks)]);
    }
    if (!in_order) std::ranges::sort(tiles);
    const auto number = static_cast<int>(known.size());
    kinds[static_cast<size_t>(rank)] = known.try_emplace({cut.columns(rank), heads_differ || rings ? rank : 0, std::move(tiles)}, number).first->second;
  }
  return kinds;
}

/// Of each rank of the pipeline, the first that holds as much of the same; itself where that is not looked for.
std::vector<int> first_alike(const PipelinePlan& pipeline, const MeshShape& shape, const Axes& axes, bool alike) {
  std::vector<int> first(static_cast<size_t>(size_along(shape, axes)));
  std::iota(first.begin(), first.end(), 0);
  if (!alike) return first;
  const std::vector<int> stages = ranks_along(shape, axes.names);
  const StageKinds kinds(pipeline, shape, axes);
  std::map<StageKind, int> known;
  for (int stage = 0; stage < static_cast<int>(first.size()); ++stage) {
    auto kind = kinds(static_cast<int>(std::ranges::find(stages, stage) - stages.begin()));
    if (!kind) continue;
    kind->beside = 0;
    first[static_cast<size_t>(stage)] = known.try_emplace(*std::move(kind), stage).first->second;
  }
  return first;
}

/// Each amount, or where it is no class of its own the largest that is near it.
std::map<int64_t, int64_t> stand_ins_of(const std::vector<int64_t>& amounts, bool apart) {
  const std::set<int64_t, std::greater<>> all(amounts.begin(), amounts.end());
  std::map<int64_t, int64_t> stand_ins;
  int64_t stands = 0;
  for (const int64_t amount : all) {
    const bool near = !stand_ins.empty() && (stands - amount) * kNearRows < *all.begin();
    if (apart || !near) stands = amount;
    stand_ins[amount] = stands;
  }
  return stand_ins;
}

}  // namespace

std::vector<std::vector<int>> rank_classes(const Config& config, int world_size, const PipelinePlan& pipeline, int exact_ranks, int64_t documents,
                                           experts::DryLoad routed) {
  const auto recorder = std::make_shared<comm::Recorder>();
  const auto world = comm::World::dry(world_size, 0, recorder, comm::world_options(config.comm));
  const Mesh mesh(world, mesh_shape(config.mesh, config.zero.stage, world_size));
  const bool apart = world_size <= exact_ranks;
  const auto& shape = mesh.shape();
  const MeshRoles axes = mesh_roles(config);
  const auto data = ranks_along(shape, axes.batch.names), tp = ranks_along(shape, axes.layers.names), shard = ranks_along(shape, axes.shard.names),
             stages = ranks_along(shape, axes.stages.names), columns = ranks_along(shape, axes.columns.names);
  // Ranks of tp hold as much where they cut evenly, but of experts, which are dealt over them and others at once.
  const bool even = cut_evenly(config, mesh.size(axes.layers)), hold_alike = even && !deals_experts(config, shape);
  const std::vector<int> like = first_alike(pipeline, shape, axes.stages, !apart && treats_layers_alike(config));
  std::map<std::pair<int, int>, Held> held;
  const auto place_of = [&](int rank) {
    const auto r = static_cast<size_t>(rank);
    return std::pair(like[static_cast<size_t>(stages[r])], hold_alike ? 0 : tp[r]);
  };
  for (int rank = 0; rank < world_size; ++rank) {
    if (!held.contains(place_of(rank))) held.emplace(place_of(rank), held_elements(config, world_size, rank, apart));
  }
  const auto held_by = [&](int rank) -> const Held& { return held.at(place_of(rank)); };

  const int data_ranks = mesh.size(axes.batch);
  const int64_t micro_batches = config.batch.global_size / config.batch.micro_size;
  const int sources = deals_experts_over_replicas(config, shape) ? config.mesh.ep * config.mesh.expert_tp : 1;
  const auto roles = config.run.deterministic ? tree_roles(micro_batches, data_ranks, sources) : std::vector<std::vector<int64_t>>{};
  const std::vector<int> parts = column_kinds(config, mesh.size(axes.columns), documents, apart);
  const std::vector<int64_t> dealt = dealt_rows(config, mesh, routed, documents);
  const auto rows_of = [&](int rank) { return dealt.empty() ? 0 : dealt[static_cast<size_t>(rank)]; };
  const std::map<int64_t, int64_t> stand_ins = stand_ins_of(dealt, apart);
  // What tp cuts need not be equal, so each of its ranks is a class of its own, where there are few or they differ; so is each stage. Parts of a sequence are
  // one where their shapes are.
  const bool alike = !apart && even;
  const auto traits_of = [&](int rank) -> RankTraits {
    const auto r = static_cast<size_t>(rank);
    const Held& held = held_by(rank);
    return {.micro_batches = chunk(micro_batches, data_ranks, data[r]).second,
            .stage = stages[r],
            .tensor_rank = alike ? 0 : tp[r],
            .column_kind = parts[static_cast<size_t>(columns[r])],
            .role = roles.empty() ? std::vector<int64_t>() : roles[static_cast<size_t>(data[r])],
            .elements = held.of_each.empty() ? Elements() : held.of_each[static_cast<size_t>(shard[r])],
            .rows = dealt.empty() ? 0 : stand_ins.at(rows_of(rank))};
  };
  std::map<RankTraits, std::vector<int>> classes;
  for (int rank = 0; rank < world_size; ++rank) classes[traits_of(rank)].push_back(rank);
  std::vector<std::vector<int>> result;
  for (auto& [traits, ranks] : classes) result.push_back(std::move(ranks));
  std::ranges::sort(result);
  const auto most = [&](int rank) {
    const auto shard_rank = static_cast<size_t>(shard[static_cast<size_t>(rank)]);
    const Held& held = held_by(rank);
    return std::pair(rows_of(rank), shard_rank < held.total.size() ? held.total[shard_rank] : 0);
  };
  for (auto& ranks : result) std::iter_swap(ranks.begin(), std::ranges::max_element(ranks, {}, most));
  return result;
}

}  // namespace tessera::plan
