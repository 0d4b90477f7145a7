#include "tessera/mesh/positions.h"

#include <gtest/gtest.h>

#include "tessera/comm/backends/record.h"
#include "tessera/core/error.h"

namespace tessera {
namespace {

TEST(Positions, AreTheMeshsOwnRanks) {
  const MeshShape shape{{"dp_replicate", 2}, {"dp_shard", 3}, {"tp", 4}};
  const auto world = comm::World::dry(24, 0, std::make_shared<comm::Recorder>());
  const Mesh mesh(world, shape);
  for (const std::vector<std::string>& axes :
       std::vector<std::vector<std::string>>{{"tp"}, {"dp_shard"}, {"dp_replicate", "dp_shard"}, {"tp", "dp_replicate"}, {"dp_replicate", "dp_shard", "tp"}}) {
    const auto ranks = ranks_along(shape, axes);
    ASSERT_EQ(ranks.size(), 24);
    for (int rank = 0; rank < 24; ++rank) EXPECT_EQ(ranks[static_cast<size_t>(rank)], mesh.rank(rank, Axes(axes)));
  }
  EXPECT_EQ(ranks_along(shape, {}), std::vector<int>(24, 0));
  EXPECT_THROW(ranks_along(shape, {"cp"}), InternalError);
  EXPECT_EQ(axes_beside({"dp_shard"}, shape), (std::vector<std::string>{"dp_replicate", "tp"}));
}

}  // namespace
}  // namespace tessera
