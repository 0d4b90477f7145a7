#include "tessera/plan/rank_classes.h"

#include <algorithm>
#include <map>
#include <numeric>

#include <nlohmann/json.hpp>

#include "tessera/comm/backends/record.h"
#include "tessera/comm/world.h"
#include "tessera/plan/bounds.h"
#include "tessera/plan/dry_routing.h"
#include "tessera/plan/dry_run.h"
#include "tessera/train/compose.h"
#include "tests/train/fixture.h"

namespace tessera {
namespace {

class RankClassesTest : public testing_support::TrainFixture {
 protected:
  template <class... Options>
  static std::vector<std::vector<int>> classes_of(const Config& config, int world, Options... options) {
    return plan::rank_classes(config, world, plan::plan_pipeline(config, world), options...);
  }

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

/// What is asked of one stage is so of those that are like it.
TEST_F(RankClassesTest, StagesBetweenTheEndsHoldWhatTheFirstOfThemDoes) {
  const int world = 15;
  for (const std::string stage : {"1", "2", "3"}) {
    const Config deep = config("gpt2", {"zero.stage=" + stage, "mesh.pp=5", "mesh.dp_shard=3", "model.layers=9", "batch.micro_size=1", "batch.global_size=12"});
    std::vector<int64_t> elements;
    for (int rank = 0; rank < world; ++rank) {
      const auto alone = comm::World::dry(world, rank, std::make_shared<comm::Recorder>(), comm::world_options(deep.comm));
      const Mesh mesh(alone, mesh_shape(deep.mesh, deep.zero.stage, world));
      const auto of_rank = compose(deep, mesh, at::kMeta).synchronizer->held_elements(mesh.rank(rank, "dp_shard"));
      elements.push_back(std::accumulate(of_rank.begin(), of_rank.end(), int64_t{0}));
    }
    const auto classes = classes_of(deep, world);
    ASSERT_EQ(classes.size(), 5);
    for (const auto& ranks : classes) {
      EXPECT_EQ(ranks.size(), 3);
      for (const int rank : ranks) EXPECT_GE(elements[static_cast<size_t>(ranks.front())], elements[static_cast<size_t>(rank)]) << "zero.stage " << stage;
    }
  }
}

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
        for (const auto& ranks : classes_of(uneven, world)) {
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
    const auto found = classes_of(cut, ranks);
    const auto peaks = train(cut, ranks).peak_of_rank;
    for (const auto& members : found) {
      for (const int rank : members) EXPECT_EQ(peaks[static_cast<size_t>(rank)], peaks[static_cast<size_t>(members.front())]) << rank;
    }
    return found.size();
  };
  EXPECT_EQ(classes(4, {"data.seq_len=64"}), 4U) << "the same tiles, each in an order of its own, beside other messages";
  EXPECT_EQ(classes(8, {"data.seq_len=64", "context.method=all_gather"}), 8U) << "a tile of all keys that a part sees";
  EXPECT_EQ(classes(4, {"data.seq_len=64", "context.method=ulysses"}), 1U);
  EXPECT_EQ(classes(4, {"data.seq_len=64", "context.method=ulysses_ring", "context.ulysses=2", "context.balance=contiguous"}), 4U) << "groups in a ring";
  EXPECT_EQ(classes(3, {"data.seq_len=36", "context.balance=contiguous"}), 3U) << "later ranks see more keys";
  EXPECT_EQ(classes(4, {"data.seq_len=64", "model.sliding_window=9"}), 2U) << "one part each, and none before the first";
  EXPECT_EQ(classes(3, {"data.seq_len=35", "context.method=ulysses"}), 3U) << "4 heads over 3 ranks";
  // Of many ranks those that meet the same tiles stand for each other; the last one's two parts lie beside each other, and are one tile.
  for (const std::string method : {"ring", "all_gather"}) {
    const Config many = config("llama", {"mesh.cp=16", "data.seq_len=64", "batch.micro_size=1", "batch.global_size=1", "context.method=" + method});
    EXPECT_EQ(classes_of(many, 16).size(), 2U);
  }
}

/// Where ranks route a part each of the tokens that they share, and experts lie with ranks of few such parts, some of these get all rows, and others none.
/// Which rank holds a few elements more says nothing of that. Of ranks that get nearly as many the one with most is run.
TEST_F(RankClassesTest, OfRanksWhoseExpertsGetOtherRowsTheFullestIsRun) {
  const std::string tp_first = R"(mesh.order=["tp","dp_replicate","dp_shard","pp","cp"])", chooses = "model.router=expert_choice";
  struct Case {
    int world;
    size_t classes;
    std::vector<std::string> sets;
  };
  const std::vector<Case> cases{
      {20, 2, {"mesh.tp=4", "mesh.dp_shard=5", "mesh.ep=2", "zero.stage=3", "model.experts=2", "model.vocab_size=300", chooses}},
      {20, 2, {"mesh.tp=4", "mesh.dp_shard=5", "mesh.ep=2", "zero.stage=3", "model.experts=6", "model.vocab_size=260", chooses, tp_first}},
      {10, 3, {"mesh.tp=2", "mesh.dp_shard=5", "mesh.ep=2", "zero.stage=3", "model.experts=6", "model.ffn_dim=52", "model.vocab_size=260", chooses, tp_first}},
      {10, 3, {"mesh.tp=2", "mesh.dp_shard=5", "mesh.ep=2", "zero.stage=2", "zero.bucket_bytes=3000", "model.vocab_size=268", chooses, tp_first}},
      {12, 2, {"mesh.tp=4", "mesh.ep=2", "model.experts=6", "model.vocab_size=260", chooses}},
      {16, 1, {"mesh.tp=2", "mesh.dp_shard=8", "mesh.ep=4", "zero.stage=1", "model.vocab_size=260"}},
      {16, 1, {"mesh.tp=2", "mesh.dp_shard=8", "mesh.ep=2", "zero.stage=3", "model.vocab_size=260", "tensor.sequence_parallel=true"}},
  };
  for (const auto& [world, classes, sets] : cases) {
    SCOPED_TRACE(::testing::PrintToString(sets));
    std::vector<std::string> all{"model.experts=4", "batch.global_size=" + std::to_string(2 * world), "run.threads=1", "run.steps=2", "comm.backend=shm"};
    all.insert(all.end(), sets.begin(), sets.end());
    const Config dealt = config("mixtral", all);
    const Mesh mesh(comm::World::dry(world, 0, std::make_shared<comm::Recorder>()), mesh_shape(dealt.mesh, dealt.zero.stage, world));
    const std::vector<int64_t> rows = plan::dealt_rows(dealt, mesh, experts::DryLoad::Even, 1);
    const auto found = classes_of(dealt, world);
    EXPECT_EQ(found.size(), classes) << ::testing::PrintToString(found);
    for (const auto& ranks : found) {
      for (const int rank : ranks) EXPECT_GE(rows.at(static_cast<size_t>(ranks.front())), rows.at(static_cast<size_t>(rank))) << rank;
    }
    if (plan::unknowns_of(dealt, world).any()) continue;  // routers', beside which a run may be any other
    const auto peaks = train(dealt, world).peak_of_rank;
    EXPECT_EQ(total_of(plan::largest_class(plan::dry_run(dealt, world)).peak_bytes), *std::ranges::max_element(peaks)) << ::testing::PrintToString(peaks);
  }
}

/// However many places experts lie at, and however uneven the rows are that come to them.
TEST_F(RankClassesTest, ManyExpertsAreFewClasses) {
  const auto classes = [&](std::vector<std::string> sets) {
    sets.insert(sets.end(), {"mesh.tp=8", "zero.stage=3", "model.experts=64", "model.heads=8", "model.dim=64", "model.vocab_size=264", "model.layers=1",
                             "batch.micro_size=1", "batch.global_size=2048"});
    return classes_of(config("mixtral", sets), 16384).size();
  };
  const std::string tp_first = R"(mesh.order=["tp","dp_replicate","dp_shard","pp","cp"])";
  EXPECT_EQ(classes({"data.seq_len=1024", "mesh.ep=64", "model.experts_per_token=8"}), 1U)
      << "each part of the tokens is as often among those that send to an expert";
  EXPECT_EQ(classes({"data.seq_len=1024", "mesh.ep=64", "model.experts_per_token=8", tp_first}), 2U) << "all, or none";
  const size_t uneven = classes({"data.seq_len=24", "mesh.ep=32", "model.experts_per_token=7", tp_first});
  EXPECT_GE(uneven, 3U);
  EXPECT_LE(uneven, 17U);
}

/// What is taken for granted of large worlds, shown of small ones, where each rank is run.
TEST_F(RankClassesTest, RanksOfEvenCutsDoTheSame) {
  for (const std::vector<std::string>& sets : std::vector<std::vector<std::string>>{{},
                                                                                    {"zero.stage=3", "mesh.dp_shard=2"},
                                                                                    {"tensor.sequence_parallel=true", "recompute.mode=full"},
                                                                                    {"model.layers=3", "mesh.pp=2", "tensor.sequence_parallel=true"}}) {
    for (const std::string family : {"llama", "gpt2"}) {
      SCOPED_TRACE(family + ::testing::PrintToString(sets));
      std::vector<std::string> all{"mesh.tp=4", "model.vocab_size=260", "batch.global_size=8"};
      all.insert(all.end(), sets.begin(), sets.end());
      const Config even = config(family, all);
      const int world = sets.size() == 3 || sets == std::vector<std::string>{"zero.stage=3", "mesh.dp_shard=2"} ? 8 : 4;
      const Mesh mesh(comm::World::dry(world, 0, std::make_shared<comm::Recorder>()), mesh_shape(even.mesh, even.zero.stage, world));
      std::map<std::pair<int, int>, nlohmann::json> of_others;
      for (nlohmann::json& ranks : plan::to_json(plan::dry_run(even, world))["ranks"]) {
        const int rank = ranks["examples"][0];
        ranks.erase("examples");
        const auto& first =
            of_others.try_emplace({mesh.rank(rank, "pp"), mesh.rank(rank, even.zero.stage > 0 ? "dp_shard" : "dp_replicate")}, ranks).first->second;
        EXPECT_EQ(first, ranks) << "rank " << rank;
      }
      auto larger = all;
      larger.emplace_back("batch.global_size=32");
      larger.emplace_back("mesh.dp_replicate=" + std::to_string(even.zero.stage > 0 ? 2 : 4));
      const int pipelines = std::ranges::find(sets, "mesh.pp=2") != sets.end() ? 2 : 1;
      EXPECT_EQ(classes_of(config(family, larger), 16 * pipelines).size(), static_cast<size_t>(pipelines));
      larger.emplace_back("model.vocab_size=261");
      EXPECT_EQ(classes_of(config(family, larger), 16 * pipelines).size(), static_cast<size_t>(4 * pipelines)) << "whose vocabulary is cut unevenly";
    }
  }
}

}  // namespace
}  // namespace tessera
