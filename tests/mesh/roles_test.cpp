#include "tessera/mesh/roles.h"

#include <gmock/gmock.h>

#include "tessera/config/config.h"

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

}  // namespace
}  // namespace tessera
