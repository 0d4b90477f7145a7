// A model cut into stages gives the gradients, losses and weights of one device, whatever the schedule and whatever else cuts it.

#include <ATen/ops/equal.h>

#include "tests/train/pipeline_fixture.h"

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
