// A model cut into stages gives the gradients, losses and weights of one device, whatever the schedule and whatever else cuts it.

#include <ATen/ops/equal.h>

#include "tessera/core/error.h"
#include "tessera/mesh/roles.h"
#include "tessera/train/evaluate.h"
#include "tessera/train/generate.h"
#include "tests/train/pipeline_fixture.h"
#include "tests/test_device.h"

namespace tessera {
namespace {

class Pipeline : public testing_support::PipelineFixture {};

TEST_F(Pipeline, OneFOneBEqualsOneDevice) {
  for (const int stages : {2, 3, 4, 8}) expect_one_device("llama", stages, {"mesh.pp=" + std::to_string(stages)});
}

TEST_F(Pipeline, EverySynchronousScheduleEqualsOneDevice) {
  for (const char* schedule : {"naive", "gpipe", "zb_h1"}) {
    expect_one_device("gpt2", 3, {"mesh.pp=3", std::string("pipeline.schedule=") + schedule}, {"model.dropout=0.1"});
  }
}

TEST_F(Pipeline, ChunksOfAModelEqualOneDevice) {
  expect_one_device("llama", 2, {"mesh.pp=2", "pipeline.schedule=interleaved", "pipeline.virtual_stages=2"});
  expect_one_device("llama", 2, {"mesh.pp=2", "pipeline.schedule=interleaved", "pipeline.virtual_stages=4"}, {"batch.global_size=8"});
  expect_one_device("gpt2", 3, {"mesh.pp=3", "pipeline.schedule=breadth_first", "pipeline.virtual_stages=2"}, {"model.dropout=0.1"});
  expect_one_device("llama", 2, {"mesh.pp=2", "pipeline.schedule=zb_v", "pipeline.virtual_stages=2"});
  expect_one_device("mlp", 2, {"mesh.pp=2", "pipeline.schedule=dualpipev", "pipeline.virtual_stages=2"});
}

TEST_F(Pipeline, FewerMicroBatchesThanStages) {
  for (const char* schedule : {"gpipe", "1f1b", "zb_h1"}) {
    expect_one_device("llama", 4, {"mesh.pp=4", std::string("pipeline.schedule=") + schedule}, {"batch.global_size=2"});
  }
}

TEST_F(Pipeline, DataRanksWithUnequalRuns) {
  expect_one_device("llama", 4, {"mesh.pp=2"}, {"batch.global_size=5"});
  expect_one_device("llama", 6, {"mesh.pp=2", "mesh.dp_shard=3", "zero.stage=2", "pipeline.schedule=zb_h1"}, {"batch.global_size=7"});
}

TEST_F(Pipeline, ZeroOfEachStageEqualsOneDevice) {
  for (const char* stage : {"zero.stage=1", "zero.stage=2", "zero.stage=3"}) {
    expect_one_device("llama", 4, {"mesh.pp=2", "mesh.dp_shard=2", stage});
    expect_one_device("llama", 4, {"mesh.pp=2", "mesh.dp_shard=2", stage, "pipeline.schedule=interleaved", "pipeline.virtual_stages=2"},
                      {"batch.global_size=8"});
  }
}

/// dualpipev leaves the gradients of weights of some micro-batches for later, and in the middle of a step.
TEST_F(Pipeline, WholeBackwardsBesideHalvesEqualOneDevice) {
  for (const char* sharding : {"zero.stage=0", "zero.stage=2", "zero.stage=3"}) {
    expect_one_device("llama", 4, {"mesh.pp=2", sharding, "zero.accumulate=whole", "pipeline.schedule=dualpipev", "pipeline.virtual_stages=2"},
                      {"batch.global_size=9"});
  }
}

TEST_F(Pipeline, TiedEmbeddingsAreOneParameter) {
  const Sets tied{"model.tie_embeddings=true"};
  expect_one_device("llama", 2, {"mesh.pp=2"}, tied);
  expect_one_device("gpt2", 3, {"mesh.pp=3", "pipeline.schedule=gpipe"}, tied);
  for (const char* stage : {"zero.stage=1", "zero.stage=2", "zero.stage=3"}) expect_one_device("llama", 6, {"mesh.pp=2", "mesh.dp_shard=3", stage}, tied);
  expect_one_device("llama", 4, {"mesh.pp=2", "mesh.tp=2"}, tied);
}

TEST_F(Pipeline, LayersThatAreCutEqualOneDevice) {
  expect_one_device("llama", 4, {"mesh.pp=2", "mesh.tp=2"});
  expect_one_device("llama", 4, {"mesh.pp=2", "mesh.tp=2", "tensor.sequence_parallel=true"}, {"model.dropout=0.1"});
  expect_one_device("gpt2", 8, {"mesh.pp=2", "mesh.tp=2", "mesh.dp_shard=2", "zero.stage=3", "pipeline.schedule=zb_h1"});
}

TEST_F(Pipeline, RecomputationEqualsOneDevice) {
  expect_one_device("llama", 2, {"mesh.pp=2", "recompute.mode=full", "pipeline.schedule=zb_h1"}, {"model.dropout=0.1"});
  expect_one_device("llama", 4, {"mesh.pp=2", "mesh.dp_shard=2", "zero.stage=3", "recompute.mode=selective"});
}

TEST_F(Pipeline, ValidatesAndGeneratesBetweenSteps) {
  struct Seen {
    std::vector<double> validation, losses;
    std::vector<int64_t> text;
  };
  const auto run = [&](int world, bool reads, const std::vector<std::string>& layout) {
    std::vector<std::string> sets{"model.dropout=0.1", "batch.global_size=8"};
    sets.insert(sets.end(), layout.begin(), layout.end());
    const Config settings = piped("llama", sets);
    const auto text = corpus(settings);
    Seen seen;
    comm::run_ranks(world, [&](comm::World& ranks) {
      validate(settings, ranks.size());
      const Mesh mesh(ranks, mesh_shape(settings.mesh, settings.zero.stage, ranks.size()));
      RankScope scope(settings, ranks.local_size());
      Stepper stepper(settings, mesh, testing_support::test_device(), scope);
      data::Loader loader(text, loader_options(settings, mesh));
      Seen mine;
      for (int i = 0; i < 2; ++i) {
        if (reads) {
          mine.validation.push_back(evaluate(stepper.forward_only(), text, 16, 40, mesh[mesh_roles(settings).batch]).loss);
          mine.text = generate(stepper.forward_only(), {1, 2, 3}, 5, {});
        }
        mine.losses.push_back(stepper.step(loader.next()).loss);
      }
      if (ranks.rank() == 0) seen = mine;
    });
    return seen;
  };
  const Seen one = run(1, true, {});
  const std::vector<std::pair<int, std::vector<std::string>>> layouts{{2, {"mesh.pp=2", "pipeline.schedule=interleaved", "pipeline.virtual_stages=2"}},
                                                                      {4, {"mesh.pp=2", "mesh.dp_shard=2", "zero.stage=3"}}};
  for (const auto& [world, layout] : layouts) {
    const Seen many = run(world, true, layout);
    EXPECT_EQ(many.text, one.text);
    for (size_t i = 0; i < one.losses.size(); ++i) EXPECT_NEAR(many.validation[i], one.validation[i], testing_support::kLosses * one.validation[i]);
    EXPECT_EQ(many.losses, run(world, false, layout).losses) << "what is read between steps changes nothing";
  }
}

/// Of a text, each rank reads what its stages take. Shapes and counts are known to all.
TEST_F(Pipeline, OnlyTheFirstStageReadsTokensAndOnlyTheLastLabels) {
  struct Read {
    int64_t tokens = 0, labels = 0, bytes = 0;
    bool operator==(const Read&) const = default;
  };
  const auto read = [&](int ranks, std::vector<std::string> sets) {
    sets.push_back("mesh.pp=" + std::to_string(ranks));
    const Config settings = piped("llama", sets);
    const auto text = corpus(settings);
    std::vector<Read> all(static_cast<size_t>(ranks));
    comm::run_ranks(ranks, [&](comm::World& world) {
      RankScope scope(settings, world.local_size());
      const Mesh mesh(world, mesh_shape(settings.mesh, 0, ranks));
      Read& mine = all[static_cast<size_t>(world.rank())];
      data::Loader loader(text, loader_options(settings, mesh));
      const int64_t before = scope.memory().current();
      const auto batch = loader.next();
      mine.bytes = scope.memory().current() - before;
      EXPECT_EQ(batch.global_valid_tokens, 6 * 16);
      for (const auto& micro : batch.micro_batches) {
        EXPECT_EQ(std::pair(micro.rows, micro.seq_len), std::pair(int64_t{1}, int64_t{16}));
        EXPECT_EQ(micro.valid_tokens, 16);
        mine.tokens += micro.tokens.defined() ? micro.tokens.numel() : 0;
        mine.labels += micro.labels.defined() ? micro.labels.numel() : 0;
      }
    });
    return all;
  };
  constexpr int64_t kAll = 6 * 16, kBytes = kAll * 8;
  EXPECT_EQ(read(1, {}), (std::vector<Read>{{kAll, kAll, 2 * kBytes}}));
  EXPECT_EQ(read(3, {}), (std::vector<Read>{{kAll, 0, kBytes}, {0, 0, 0}, {0, kAll, kBytes}}));
  EXPECT_EQ(read(2, {"pipeline.schedule=zb_v", "pipeline.virtual_stages=2"}), (std::vector<Read>{{kAll, kAll, 2 * kBytes}, {0, 0, 0}}))
      << "both ends on rank 0";
}

TEST_F(Pipeline, AnySplitEqualsOneDevice) {
  expect_one_device("llama", 3, {"mesh.pp=3", "pipeline.split=[\"1\", \"6\", \"1\"]"});
  expect_one_device("llama", 3, {"mesh.pp=3", "pipeline.split=[\"layers.0\", \"layers.5\"]"});
}

/// As with all techniques, bits do not depend on how the batch is dealt; those of stages are another order of sums than one device's.
TEST_F(Pipeline, FixedTreesHaveTheSameBitsForAnyDataRanks) {
  const auto of = [&](int world) {
    return train(piped("llama", {"mesh.pp=2", "run.deterministic=true", "pipeline.schedule=interleaved", "pipeline.virtual_stages=2", "batch.global_size=8"}),
                 world);
  };
  const Trace two = of(2), four = of(4);
  for (const auto& [name, gradient] : two.gradients) EXPECT_TRUE(at::equal(gradient, four.gradients.at(name))) << name;
  EXPECT_EQ(two.steps.back().loss, four.steps.back().loss);
  EXPECT_EQ(two.steps.back().grad_norm, four.steps.back().grad_norm);
}

/// In bytes: GPipe holds what all m micro-batches need, 1F1B that of min(m, p - i) on rank i, whatever m is.
TEST_F(Pipeline, PeaksFollowTheSchedulesFormulas) {
  constexpr int64_t kBoundary = 16 * 24 * 4;  // what crosses, in bytes: received ahead, or not sent yet
  const auto peaks = [&](const char* schedule, int micro_batches) {
    return train(piped("llama", {"mesh.pp=4", std::string("pipeline.schedule=") + schedule, "batch.global_size=" + std::to_string(micro_batches)}), 4)
        .peak_of_rank;
  };
  const auto gpipe_5 = peaks("gpipe", 5), gpipe_6 = peaks("gpipe", 6), ours_6 = peaks("1f1b", 6), ours_9 = peaks("1f1b", 9);
  const int64_t activations = gpipe_6[1] - gpipe_5[1];  // of a micro-batch in two blocks: ranks 1 and 2 are alike
  EXPECT_GT(activations, 20 * kBoundary);
  EXPECT_NEAR(gpipe_6[2] - gpipe_5[2], activations, kBoundary);
  EXPECT_NEAR(ours_6[1] - ours_6[2], activations, kBoundary);  // 3 and 2 are alive
  for (const size_t rank : {1, 2}) EXPECT_NEAR(ours_9[rank], ours_6[rank], 3 * kBoundary);
}

}  // namespace
}  // namespace tessera
