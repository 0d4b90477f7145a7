#include "tessera/mesh/mesh.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tessera/comm/backends/record.h"
#include "tessera/comm/collectives.h"
#include "tessera/comm/testing.h"
#include "tessera/config/config.h"
#include "tessera/core/error.h"

namespace tessera {
namespace {

using comm::World;

template <class Exception>
std::string message(const std::function<void()>& body) {
  try {
    body();
  } catch (const Exception& error) {
    return error.what();
  }
  return "no exception";
}

World dry(int size, int rank) { return World::dry(size, rank, std::make_shared<comm::Recorder>()); }

TEST(Mesh, NumbersRanksWithTheFirstAxisSlowest) {
  const auto world = dry(24, 17);
  const Mesh mesh(world, {{"dp", 2}, {"pp", 3}, {"tp", 4}});  // 17 = 1 * 12 + 1 * 4 + 1
  EXPECT_EQ(mesh.coordinates(), (std::vector<int>{1, 1, 1}));
  EXPECT_EQ(mesh.coordinates(23), (std::vector<int>{1, 2, 3}));
  EXPECT_EQ(mesh.world_rank({1, 2, 3}), 23);
  EXPECT_EQ(mesh.size("pp"), 3);
  EXPECT_EQ(mesh.rank("pp"), 1);
  EXPECT_EQ(mesh.members({"tp"}), (std::vector<int>{16, 17, 18, 19}));
  EXPECT_EQ(mesh.members({"pp"}), (std::vector<int>{13, 17, 21}));
  EXPECT_EQ(mesh.members({"dp"}), (std::vector<int>{5, 17}));
  EXPECT_EQ(mesh.members({"tp", "dp"}), (std::vector<int>{4, 5, 6, 7, 16, 17, 18, 19}));
  EXPECT_EQ(mesh.size({"dp", "tp"}), 8);
  EXPECT_EQ(mesh.rank({"tp", "dp"}), 5);
  EXPECT_EQ(mesh.members({}), std::vector<int>{17});
  EXPECT_EQ(mesh.members(6, {"dp"}), (std::vector<int>{6, 18}));
  EXPECT_EQ(mesh.members(6, {"tp"}), (std::vector<int>{4, 5, 6, 7}));
  EXPECT_TRUE(mesh.has("dp"));
  EXPECT_FALSE(mesh.has("cp"));
}

TEST(Mesh, EveryRanksCoordinatesAreItsOwn) {
  const auto world = dry(30, 0);
  const Mesh mesh(world, {{"a", 5}, {"b", 1}, {"c", 3}, {"d", 2}});
  for (int rank = 0; rank < 30; ++rank) EXPECT_EQ(mesh.world_rank(mesh.coordinates(rank)), rank);
  EXPECT_EQ(mesh.rank(17, "a"), 2);
  EXPECT_EQ(mesh.rank(17, {"d", "a"}), 5);  // the mesh's order, not the question's
  EXPECT_EQ(size_along(mesh.shape(), {"d", "a"}), 10);
  EXPECT_THROW(size_along(mesh.shape(), "e"), InternalError);
}

TEST(Mesh, IsRegroupedForWhatIsDealtOtherwise) {
  const auto world = dry(24, 13);
  const Mesh mesh(world, {{"dp_shard", 2}, {"pp", 3}, {"cp", 1}, {"tp", 4}});  // 13 = dp_shard 1, pp 0, tp 1
  const Mesh experts = mesh.regrouped({"dp_shard", "cp", "tp"}, {{"edp", 4}, {"ep", 2}});
  EXPECT_EQ(experts.shape(), (MeshShape{{"pp", 3}, {"edp", 4}, {"ep", 2}}));
  EXPECT_EQ(mesh.members({"dp_shard", "tp"}), (std::vector<int>{0, 1, 2, 3, 12, 13, 14, 15}));
  EXPECT_EQ(experts.members({"edp", "ep"}), mesh.members({"dp_shard", "cp", "tp"}));
  EXPECT_EQ(experts.members("ep"), (std::vector<int>{12, 13}));
  EXPECT_EQ(experts.members("edp"), (std::vector<int>{1, 3, 13, 15}));
  EXPECT_EQ(experts.members("pp"), mesh.members("pp"));
  EXPECT_EQ(experts.coordinates(), (std::vector<int>{0, 2, 1}));
  for (int rank = 0; rank < 24; ++rank) EXPECT_EQ(experts.world_rank(experts.coordinates(rank)), rank);
}

TEST(Mesh, RegroupedGroupsCommunicate) {
  comm::run_ranks(8, [](World& world) {
    const Mesh mesh(world, {{"dp_shard", 2}, {"pp", 2}, {"tp", 2}});
    const Mesh experts = mesh.regrouped({"dp_shard", "tp"}, {{"edp", 1}, {"ep", 4}});
    const at::Tensor sum = at::full({1}, static_cast<double>(world.rank()));
    comm::all_reduce(experts["ep"], sum);
    EXPECT_EQ(sum.item<double>(), mesh.rank("pp") == 0 ? 0 + 1 + 4 + 5 : 2 + 3 + 6 + 7);
  });
}

TEST(Mesh, RefusesARegroupingThatDoesNotComeOut) {
  const auto world = dry(8, 0);
  const Mesh mesh(world, {{"dp", 2}, {"pp", 2}, {"tp", 2}});
  EXPECT_EQ(message<ConfigError>([&] { mesh.regrouped({"dp", "tp"}, {{"edp", 3}, {"ep", 2}}); }),
            "mesh: edp 3 x ep 2 = 6 is not the size 4 of dp+tp, which it is to regroup; change an axis");
  EXPECT_EQ(message<ConfigError>([&] { mesh.regrouped({"dp", "tp"}, {{"pp", 2}, {"ep", 2}}); }), "mesh: the axis pp is named twice");
}

TEST(Mesh, GroupsOfOneOrSeveralAxesCommunicate) {
  comm::run_ranks(8, [](World& world) {
    const Mesh mesh(world, {{"dp_replicate", 1}, {"dp_shard", 2}, {"cp", 2}, {"tp", 2}});
    const auto sum_over = [&](const comm::Group& group) {
      auto sum = at::full({1}, float(1 << world.rank()));
      comm::all_reduce(group, sum);
      return static_cast<int>(sum.item<float>());
    };
    const auto bits_of = [&](const std::vector<std::string>& axes) {
      int bits = 0;
      for (const int rank : mesh.members(axes)) bits += 1 << rank;
      return bits;
    };
    EXPECT_EQ(sum_over(mesh["tp"]), bits_of({"tp"}));
    EXPECT_EQ(sum_over(mesh[{"dp_shard", "cp"}]), bits_of({"dp_shard", "cp"}));
    EXPECT_EQ(sum_over(mesh[{"cp", "tp", "dp_shard"}]), 255);
    EXPECT_EQ(mesh[(std::vector<std::string>{"cp", "dp_shard"})].engine(), (mesh[{"dp_shard", "cp"}].engine()));  // made once
    EXPECT_EQ((mesh[{"dp_replicate", "cp"}].engine()), mesh["cp"].engine());                                      // size 1 is left out
    EXPECT_EQ((mesh[{"dp_shard", "cp"}].name()), "dp_shard+cp");
    EXPECT_EQ((mesh[{"dp_shard", "cp"}].rank()), (mesh.rank({"dp_shard", "cp"})));
    const auto alone = mesh["dp_replicate"];
    EXPECT_EQ(alone.size(), 1);
    EXPECT_EQ(alone.name(), "dp_replicate");
    EXPECT_EQ(alone.engine(), nullptr);
  });
}

TEST(Mesh, OutlivesItsWorld) {
  auto world = std::make_unique<World>(dry(4, 1));
  const Mesh mesh(*world, {{"dp", 2}, {"tp", 2}});
  world.reset();
  EXPECT_EQ(mesh["tp"].size(), 2);
}

TEST(Mesh, OfManyRanksNeedsNoNetwork) {
  const int size = 16384;
  for (const int rank : {0, size / 2, size - 1}) {
    const auto world = dry(size, rank);
    const Mesh mesh(world, {{"dp_replicate", 4}, {"dp_shard", 128}, {"pp", 4}, {"cp", 1}, {"tp", 8}});
    for (const auto* axis : {"dp_replicate", "dp_shard", "pp", "cp", "tp"}) EXPECT_EQ(mesh[axis].rank(), mesh.rank(axis));
    const auto data = mesh[{"dp_replicate", "dp_shard", "cp"}];
    EXPECT_EQ(data.size(), 512);
    EXPECT_EQ(data.world_rank(data.rank()), rank);
  }
}

TEST(Mesh, RefusesWithTheProductPrinted) {
  const auto world = dry(8, 0);
  EXPECT_EQ(message<ConfigError>([&] { Mesh(world, {{"dp", 3}, {"tp", 2}}); }),
            "mesh: dp 3 x tp 2 = 6 is not the world size 8; change an axis or the number of ranks");
  EXPECT_EQ(message<ConfigError>([&] { Mesh(world, {{"dp", 8}, {"tp", 0}}); }), "mesh.tp = 0 must be at least 1");
  EXPECT_EQ(message<ConfigError>([&] { Mesh(world, {{"dp", 4}, {"dp", 2}}); }), "mesh: the axis dp is named twice");
  EXPECT_THROW(Mesh(world, {}), ConfigError);
  const Mesh mesh(world, {{"dp", 4}, {"tp", 2}});
  EXPECT_THAT(message<InternalError>([&] { mesh["ep"]; }), ::testing::HasSubstr("mesh has no axis ep; it has dp, tp"));
  EXPECT_THAT(message<InternalError>([&] { mesh[{"dp", "dp"}]; }), ::testing::HasSubstr("mesh axis named twice: dp"));
  EXPECT_THROW(mesh.coordinates(8), InternalError);
  EXPECT_THROW(mesh.world_rank({4, 0}), InternalError);
}

TEST(MeshShape, TakesWhatIsLeft) {
  using ::testing::ElementsAre;
  using ::testing::Pair;
  MeshConfig config;
  const auto all = [](int replicate, int shard, int tp) {
    return ElementsAre(Pair("dp_replicate", replicate), Pair("dp_shard", shard), Pair("pp", 1), Pair("cp", 1), Pair("tp", tp));
  };
  EXPECT_THAT(mesh_shape(config, 0, 1), all(1, 1, 1));
  EXPECT_THAT(mesh_shape(config, 0, 6), all(6, 1, 1));
  EXPECT_THAT(mesh_shape(config, 2, 6), all(1, 6, 1));
  config.tp = 2;
  EXPECT_THAT(mesh_shape(config, 0, 6), all(3, 1, 2));
  config.dp_replicate = 3;
  config.tp = -1;
  EXPECT_THAT(mesh_shape(config, 0, 6), all(3, 1, 2));
  config.tp = 4;
  EXPECT_THAT(message<ConfigError>([&] { mesh_shape(config, 0, 6); }), ::testing::HasSubstr("12"));
}

}  // namespace
}  // namespace tessera
