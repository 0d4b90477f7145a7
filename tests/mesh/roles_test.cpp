#include "tessera/mesh/roles.h"

#include <ranges>

#include <gmock/gmock.h>

#include "tessera/config/config.h"
#include "tessera/core/error.h"

namespace tessera {
namespace {

using ::testing::ElementsAre;
using ::testing::IsSupersetOf;

MeshRoles roles(int stage, bool deterministic = false) {
  Config config;
  config.zero.stage = stage;
  config.run.deterministic = deterministic;
  return mesh_roles(config);
}

TEST(MeshRoles, PartsOfASequenceAreTermsOfTheSameSumsAsSamples) {
  for (const int stage : {0, 1, 2, 3}) {
    const MeshRoles all = roles(stage);
    EXPECT_THAT(all.batch.names, ElementsAre("dp_replicate", "dp_shard")) << "samples are dealt over these alone";
    EXPECT_THAT(all.tokens.names, ElementsAre("dp_replicate", "dp_shard", "cp"));
    EXPECT_THAT(all.gradients.names, ElementsAre("dp_replicate", "dp_shard", "cp"));
    EXPECT_THAT(all.shard.names, ElementsAre("dp_shard", "cp"));
  }
}

TEST(MeshRoles, WhatIsShardedLiesOverPartsOfASequenceToo) {
  for (const int stage : {1, 2, 3}) {
    EXPECT_THAT(roles(stage).cut.names, IsSupersetOf({"dp_shard", "cp", "tp"}));
    EXPECT_THAT(roles(stage).tied.names, IsSupersetOf({"dp_shard", "cp", "pp"}));
    EXPECT_THAT(roles(stage).elements.names, IsSupersetOf({"dp_shard", "cp", "pp", "tp"}));
  }
  EXPECT_THAT(roles(0).elements.names, ElementsAre("pp", "tp")) << "each rank of cp has all elements";
}

TEST(MeshRoles, TheFixedTreeIsOverMicroBatchesAlone) { EXPECT_THAT(roles(0, true).gradients.names, ElementsAre("dp_replicate", "dp_shard")); }

/// The configuration's rules, which know no mesh, and the grid that is made of it later: of all small meshes, those are taken whose ranks make up the grid.
TEST(MeshRoles, RulesOfExpertsAreTheGridOfExperts) {
  int taken = 0, refused = 0;
  for (const int code : std::views::iota(0, 2 * 2 * 2 * 2 * 2 * 3 * 2)) {
    int rest = code;
    const auto next = [&](int base) {
      const int one = rest % base;
      rest /= base;
      return one;
    };
    Config config;
    config.model = {.family = "mixtral", .dim = 16, .layers = 2, .heads = 4, .ffn_dim = 12, .vocab_size = 256, .experts = 12, .experts_per_token = 2};
    config.data.seq_len = 16;
    config.batch.global_size = 16;
    config.run.steps = 1;
    config.optim.lr = 1e-3;
    config.zero.stage = 2 * next(2);
    config.run.deterministic = next(2) == 1 && config.zero.stage == 0;
    const int data = 1 + next(2), cp = 1 + next(2), tp = 1 + next(2);
    (config.zero.stage > 0 ? config.mesh.dp_shard : config.mesh.dp_replicate) = 3 * data;
    config.mesh.cp = cp;
    config.mesh.tp = tp;
    config.mesh.ep = 1 + next(3);
    config.mesh.expert_tp = 1 + next(2);
    resolve(config);
    std::string told;
    try {
      validate(config, 3 * data * cp * tp, Purpose::Plan);
    } catch (const ConfigError& error) {
      told = error.what();
    }
    const MeshShape shape = mesh_shape(config.mesh, config.zero.stage, 3 * data * cp * tp);
    const auto [over, into] = expert_grid(config, shape);
    int ranks = 1;
    for (const auto& [axis, size] : into) ranks *= size;
    const bool fits = ranks == size_along(shape, over);
    (fits ? taken : refused) += 1;
    EXPECT_EQ(told.find("deals experts over") == std::string::npos, fits) << told << " (mesh " << code << ")";
  }
  EXPECT_GT(taken, 20);
  EXPECT_GT(refused, 20);
}

}  // namespace
}  // namespace tessera
