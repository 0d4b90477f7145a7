#include "tessera/plan/rank_classes.h"

#include <algorithm>
#include <numeric>

#include "tessera/comm/backends/record.h"
#include "tessera/comm/world.h"
#include "tessera/train/compose.h"
#include "tests/train/fixture.h"

namespace tessera {
namespace {

class RankClassesTest : public testing_support::TrainFixture {
 protected:
  /// Elements that each rank holds of what is sharded.
  static std::vector<int64_t> held(const Config& config, int world) {
    const auto ranks = comm::World::dry(world, 0, std::make_shared<comm::Recorder>(), comm::world_options(config.comm));
    const Mesh mesh(ranks, mesh_shape(config.mesh, config.zero.stage, world));
    const Composition run = compose(config, mesh, at::kMeta);
    std::vector<int64_t> held;
    for (int rank = 0; rank < world; ++rank) {
      const auto elements = run.synchronizer->held_elements(mesh.rank(rank, "dp_shard"));
      held.push_back(std::accumulate(elements.begin(), elements.end(), int64_t{0}));
    }
    return held;
  }
};

TEST_F(RankClassesTest, OfManyRanksTheOneThatHoldsMostStandsForItsClass) {
  bool other_than_first = false;
  for (const int world : {9, 11, 16}) {
    for (const std::string stage : {"1", "2", "3"}) {
      for (const std::string wrap : {"layers.*", "**"}) {
        if (stage != "3" && wrap == "**") continue;
        const Config uneven =
            config("gpt2", {"zero.stage=" + stage, "zero.wrap=" + wrap, "batch.micro_size=1", "batch.global_size=" + std::to_string(3 * world / 2)});
        const auto elements = held(uneven, world);
        std::vector<int> all;
        for (const auto& ranks : plan::rank_classes(uneven, world)) {
          const int64_t stands = elements[static_cast<size_t>(ranks.front())];
          for (const int rank : ranks) EXPECT_GE(stands, elements[static_cast<size_t>(rank)]) << "rank " << ranks.front() << " for rank " << rank;
          const int first = *std::ranges::min_element(ranks);
          other_than_first = other_than_first || stands > elements[static_cast<size_t>(first)];
          all.insert(all.end(), ranks.begin(), ranks.end());
        }
        std::ranges::sort(all);
        std::vector<int> everyone(static_cast<size_t>(world));
        std::iota(everyone.begin(), everyone.end(), 0);
        EXPECT_EQ(all, everyone);
      }
    }
  }
  EXPECT_TRUE(other_than_first) << "then any rank would do";
}

/// Of ranks that a sequence is cut over, those that do the same stand for each other: to the byte, in a real run.
TEST_F(RankClassesTest, PartsOfASequenceAreOneClassWhereTheirShapesAre) {
  const auto classes = [&](int ranks, std::vector<std::string> sets) {
    sets.insert(sets.end(), {"mesh.cp=" + std::to_string(ranks), "batch.micro_size=1", "batch.global_size=1", "run.steps=2"});
    const Config cut = config("llama", sets);
    const auto found = plan::rank_classes(cut, ranks);
    const auto peaks = train(cut, ranks).peak_of_rank;
    for (const auto& members : found) {
      for (const int rank : members) EXPECT_EQ(peaks[static_cast<size_t>(rank)], peaks[static_cast<size_t>(members.front())]) << rank;
    }
    return found.size();
  };
  // The last rank's two parts lie beside each other, and are one tile.
  EXPECT_EQ(classes(4, {"data.seq_len=64"}), 2U);
  EXPECT_EQ(classes(8, {"data.seq_len=64", "context.method=all_gather"}), 2U);
  EXPECT_EQ(classes(4, {"data.seq_len=64", "context.method=ulysses"}), 1U);
  EXPECT_EQ(classes(3, {"data.seq_len=36", "context.balance=contiguous"}), 3U) << "later ranks see more keys";
  EXPECT_EQ(classes(3, {"data.seq_len=35", "context.method=ulysses"}), 3U) << "4 heads over 3 ranks";
}

}  // namespace
}  // namespace tessera
