#include "tessera/train/expert_ranks.h"

#include "tessera/mesh/roles.h"
#include "tessera/nn/parameter.h"

// Attention and embeddings go by tp; experts by a grid of their own, of which tp is a part. Where state is sharded, that grid has a place for every rank of
// dp_shard x cp x tp, and each holds elements that no other has: whoever shards them sums their gradients over the ranks of "edp". Where nothing is sharded,
// the grid is of tp alone, data parallelism treats experts as all else, and the ranks of tp that hold the same experts have computed other tokens: each has a
// term.

namespace tessera {
namespace {

nn::Sharing shared_over(const comm::Group& layers, const Config& config, int holders) {
  const int apart = config.zero.stage > 0 ? layers.size() : layers.size() / holders;
  const int set = layers.rank() % apart;
  return {.axis = layers.name(), .rank = layers.rank(), .first = set, .holders = holders, .set = set, .sets = apart, .is_term = holders > 1};
}

}  // namespace

ExpertRanks expert_ranks(const Config& config, const Mesh& mesh) {
  ExpertRanks ranks{.exchange = comm::Group::self(), .same_tokens = comm::Group::self(), .sharing = {}};
  if (!deals_experts(config, mesh.shape())) return ranks;
  const Mesh grid = expert_mesh(config, mesh);
  const comm::Group layers = mesh[mesh_roles(config).layers];
  ranks.exchange = grid[{"ep", "expert_tp"}];
  ranks.sharers = config.mesh.expert_tp;
  ranks.apart = deals_experts_over_replicas(config, mesh.shape());
  if (layers.size() == 1) return ranks;
  if (!config.tensor.sequence_parallel) ranks.same_tokens = layers;
  ranks.sharing = shared_over(layers, config, config.zero.stage > 0 ? 1 : grid.size("edp"));
  return ranks;
}

std::unique_ptr<ExpertParallel> deal_experts(LanguageModel& model, const ExpertRanks& ranks) {
  if (ranks.sharing) {
    for (const auto& parameter : nn::unique_parameters(model, experts_of(model, true))) nn::add_sharing(parameter.tensor, *ranks.sharing);
  }
  if (ranks.exchange.size() == 1 && ranks.same_tokens.size() == 1) return nullptr;
  return expert_parallel(model, ranks.exchange, {.sharers = ranks.sharers, .same_tokens = ranks.same_tokens, .apart = ranks.apart, .watch = false});
}

}  // namespace tessera
