// Stage 3 under pipelines: how often each unit is gathered and its gradients reduced in a step, by the recorder, on meta; and that when units stay, and what is
// fetched ahead, changes no bit.

#include <ATen/ops/equal.h>
#include <gmock/gmock.h>

#include "tessera/comm/backends/record.h"
#include "tests/refusal.h"
#include "tests/train/fixture.h"

namespace tessera {
namespace {

using testing_support::TrainFixture;

/// Of one unit in a step.
struct Moves {
  int64_t gathers = 0, reductions = 0;
  bool operator==(const Moves&) const = default;
};
std::ostream& operator<<(std::ostream& out, const Moves& moves) { return out << moves.gathers << " gathers, " << moves.reductions << " reductions"; }

constexpr int64_t kMicro = 4;

class PipelineSharding : public TrainFixture {
 protected:
  Config settings(const std::string& schedule, int chunks, const std::vector<std::string>& more) const {
    std::vector<std::string> sets{"mesh.pp=2",           "mesh.dp_shard=2",
                                  "zero.stage=3",        "model.layers=10",
                                  "run.steps=3",         "batch.micro_size=1",
                                  "batch.global_size=8", "pipeline.schedule=" + schedule,
                                  "run.threads=1",       "pipeline.virtual_stages=" + std::to_string(chunks)};
    sets.insert(sets.end(), more.begin(), more.end());
    return config("llama", sets);
  }

  /// What the first rank of the pipeline moves in its third step, by unit.
  std::map<std::string, Moves> moves(const std::string& schedule, int chunks, const std::vector<std::string>& more = {}) const {
    const Config config = settings(schedule, chunks, more);
    validate(config, 4);
    const auto recorder = std::make_shared<comm::Recorder>();
    auto world = comm::World::dry(4, 0, recorder, comm::world_options(config.comm));
    const Mesh mesh(world, mesh_shape(config.mesh, config.zero.stage, 4));
    RankScope scope(config, 1);
    Stepper stepper(config, mesh, at::kMeta, scope);
    const data::LoaderOptions loader = loader_options(config, mesh);
    for (int step = 1; step <= 3; ++step) {
      recorder->clear();
      stepper.step(data::dry_batch(loader, step, at::kMeta));
    }
    std::map<std::string, Moves> seen;
    for (const CollectiveEvent& record : recorder->records()) {
      if (record.op == "all_gather" && record.site.starts_with("layers.")) ++seen[record.site].gathers;
      if (record.op == "reduce_scatter" && record.site.starts_with("layers.")) ++seen[record.site].reductions;
    }
    return seen;
  }

  const std::vector<std::string> whole_{"zero.accumulate=whole"};
  const std::vector<std::string> stay_{"zero.reshard_after_forward=false"};
};

/// Where the first rank has one stage, it is the embedding and layers.0 to layers.4; of two, the embedding and layers.0 and .1, and layers.5 to .7.
TEST_F(PipelineSharding, UnitsComeAndGoWithEveryPassWhereTheyAreFreedAfterForward) {
  for (const char* schedule : {"gpipe", "1f1b", "zb_h1"}) {
    const auto seen = moves(schedule, 1);
    ASSERT_EQ(seen.size(), 5) << schedule;
    // A backward with the gradients of weights behind it brings some of them itself, and these are reduced by themselves.
    const int64_t reductions = (schedule == std::string("zb_h1") ? 2 : 1) * kMicro;
    for (int layer = 0; layer < 4; ++layer) EXPECT_EQ(seen.at("layers." + std::to_string(layer)), (Moves{2 * kMicro, reductions})) << schedule << layer;
  }
  for (const auto& [unit, moved] : moves("1f1b", 1, whole_)) EXPECT_EQ(moved.reductions, 1) << unit;
}

/// The unit with which the next action begins is not let go in between.
TEST_F(PipelineSharding, WhatTheNextActionBeginsWithStays) {
  const auto seen = moves("gpipe", 1);
  EXPECT_EQ(seen.at("layers.4"), (Moves{2 * kMicro - 1, kMicro})) << "from the last forward to the first backward";
  EXPECT_EQ(moves("gpipe", 1, {"zero.prefetch=0"}).at("layers.4"), (Moves{2 * kMicro, kMicro})) << "nothing is held ahead of its use";
}

TEST_F(PipelineSharding, AStepGathersAUnitOnceWhereItStays) {
  for (const auto& [schedule, chunks] :
       std::vector<std::pair<const char*, int>>{{"gpipe", 1}, {"1f1b", 1}, {"zb_h1", 1}, {"interleaved", 2}, {"breadth_first", 2}}) {
    const auto seen = moves(schedule, chunks, stay_);
    EXPECT_GE(seen.size(), 4) << schedule;
    for (const auto& [unit, moved] : seen) EXPECT_EQ(moved.gathers, 1) << schedule << ", " << unit;
    std::vector<std::string> both = stay_;
    both.push_back(whole_.front());
    for (const auto& [unit, moved] : moves(schedule, chunks, both)) EXPECT_EQ(moved, (Moves{1, 1})) << schedule << ", " << unit;
  }
}

/// Breadth-first with full sharding (arXiv:2211.05953): once for all forwards and once for all backwards of a chunk, of the last chunk once for both.
TEST_F(PipelineSharding, BreadthFirstGathersAChunkTwiceAStep) {
  const auto seen = moves("breadth_first", 2, whole_);
  EXPECT_EQ(seen.at("layers.0"), (Moves{2, 1}));
  EXPECT_EQ(seen.rbegin()->second, (Moves{1, 1})) << seen.rbegin()->first;
  EXPECT_EQ(moves("breadth_first", 2).at("layers.0"), (Moves{2, kMicro}));
  EXPECT_EQ(moves("interleaved", 2).at("layers.0"), (Moves{2 * kMicro, kMicro}));
}

/// Holding and fetching move the same values at other times.
TEST_F(PipelineSharding, NoBitDependsOnWhenUnitsAreGathered) {
  for (const auto& [schedule, chunks] : std::vector<std::pair<const char*, int>>{{"1f1b", 1}, {"zb_h1", 1}, {"interleaved", 2}, {"breadth_first", 2}}) {
    const auto trained = [&](const std::vector<std::string>& more) {
      std::vector<std::string> sets{"model.layers=4", "run.steps=2"};
      sets.insert(sets.end(), more.begin(), more.end());
      return train(settings(schedule, chunks, sets), 4).weights;
    };
    const auto plain = trained({"zero.prefetch=0"});
    for (const std::vector<std::string>& other : {std::vector<std::string>{"zero.prefetch=3"}, {stay_.front(), "zero.prefetch=2", "recompute.mode=full"}}) {
      const auto got = trained(other);
      ASSERT_EQ(got.size(), plain.size());
      for (const auto& [name, weight] : plain) EXPECT_TRUE(at::equal(got.at(name), weight)) << schedule << ", " << other.back() << ", " << name;
    }
  }
}

TEST_F(PipelineSharding, UnitsOfALayerAloneAreRefusedWhereItsProductsBeginBefore) {
  const auto check = [&](const std::string& wrap, const std::string& overlap) {
    const Config given = config("llama", {"mesh.tp=2", "zero.stage=3", "zero.wrap=" + wrap, "tensor.overlap=" + overlap});
    check_modules(given, mesh_shape(given.mesh, given.zero.stage, 2));
  };
  EXPECT_THAT(testing_support::refusal([&] { check("**", "true"); }), ::testing::HasSubstr("makes 'layers.0.attention.wq' a unit by itself"));
  EXPECT_NO_THROW(check("**", "false"));
  EXPECT_NO_THROW(check("layers.*", "true"));
  EXPECT_NO_THROW(check("layers.*.*", "true"));
}

/// Its parts begin and end elsewhere on the first stage than on the last: what updates them must not tell by it, or one weight becomes two, a last bit first.
TEST_F(PipelineSharding, ATiedWeightStaysOneOnBothStages) {
  for (const std::string& optimizer : {"adamw", "sgd", "lion"}) {
    Config tied =
        settings("1f1b", 1, {"mesh.dp_shard=3", "model.dim=12", "model.heads=2", "model.layers=2", "model.tie_embeddings=true", "optim.name=" + optimizer});
    if (optimizer == "sgd") tied.optim.momentum = 0.9;
    testing_support::SliceCollector first, last;
    const auto text = corpus(tied);
    comm::run_ranks(6, [&](comm::World& ranks) {
      validate(tied, ranks.size());
      const Mesh mesh(ranks, mesh_shape(tied.mesh, tied.zero.stage, ranks.size()));
      RankScope scope(tied, ranks.local_size());
      Stepper stepper(tied, mesh, at::kCPU, scope);
      data::Loader loader(text, loader_options(tied, mesh));
      for (int step = 1; step <= 6; ++step) stepper.step(loader.next());
      (mesh["pp"].rank() == 0 ? first : last).add_values(stepper.run().updated);
    });
    const std::string name = "embed_tokens.weight";
    EXPECT_TRUE(at::equal(first.whole().at(name), last.whole().at(name))) << optimizer;
  }
}

}  // namespace
}  // namespace tessera
