#include "tessera/verify/verify.h"

#include <gmock/gmock.h>

#include "tessera/core/error.h"
#include "tests/verify/fixture.h"

namespace tessera {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

using VerifyTest = testing_support::VerifyFixture;

TEST_F(VerifyTest, DataParallelPasses) {
  for (const char* mesh : {"dp_replicate=2", "dp_replicate=3", "dp_replicate=5"}) expect_passes(mesh, "llama", {"model.kv_heads=2"});
  expect_passes("dp_replicate=3", "gpt2", {"model.dropout=0.1"});
  expect_passes("dp_replicate=2", "llama", {"model.tie_embeddings=true", "model.dropout=0.1"});
  expect_passes("dp_replicate=7", "mlp", {"optim.name=sgd", "optim.momentum=0.9"});
  expect_passes("dp_replicate=2", "mlp", {"comm.compression=bf16"});
  expect_passes("dp_replicate=2", "mlp", {"comm.check=true", "comm.backend=gloo"});
}

TEST_F(VerifyTest, RecomputationOnOneRankIsBitForBit) {
  const auto alone = run("dp_replicate=1", "llama", {"recompute.mode=full", "model.dropout=0.1"});
  EXPECT_TRUE(alone.passed() && alone.bit_for_bit) << to_string(alone);
  EXPECT_EQ(alone.backward.bit_equal, alone.backward.compared);
  EXPECT_EQ(alone.forward.unseen + alone.backward.unseen, 0);
}

TEST_F(VerifyTest, SlicesOnTheHostPassAndAreBitForBitOnOneRank) {
  const std::vector<std::string> sets{"zero.stage=3", "offload.params=host", "offload.gradients=host", "offload.optimizer=host", "model.dropout=0.1"};
  const auto alone = run("dp_shard=1", "llama", sets);
  EXPECT_TRUE(alone.passed() && alone.bit_for_bit) << to_string(alone);
  expect_passes("dp_shard=3", "llama", sets);
  expect_passes("dp_shard=2,dp_replicate=2", "gpt2", sets);
}

TEST_F(VerifyTest, StateElsewhereStreamedGradientsAndLayersOneByOnePass) {
  const std::string dir = "offload.dir=" + (folder_ / "away").string();
  for (const std::vector<std::string>& sets : {std::vector<std::string>{"offload.gradients=host", "offload.optimizer=disk", dir},
                                               {"offload.optimizer=host", "offload.update=device"},
                                               {"zero.stage=3", "offload.params={ \"layers.*\" = \"disk\", \"layers.0\" = \"host\" }", dir},
                                               {"zero.stage=3", "offload.params=host", "offload.gradients=host", "offload.optimizer=disk", dir,
                                                "pipeline.schedule=breadth_first", "pipeline.virtual_stages=4"}}) {
    const auto alone = run("dp_shard=1", "llama", sets);
    EXPECT_TRUE(alone.passed() && alone.bit_for_bit) << to_string(alone);
  }
  expect_passes("tp=2", "llama", {"offload.gradients=host", "offload.optimizer=host"});
  expect_passes("pp=2", "llama", {"offload.gradients=host", "offload.optimizer=host"});
  expect_passes("dp_shard=2", "llama", {"zero.stage=2", "offload.optimizer=disk", dir});
  expect_passes("dp_shard=2,tp=2", "llama",
                {"zero.stage=3", "offload.params=host", "offload.gradients=host", "offload.optimizer=host", "pipeline.schedule=breadth_first",
                 "pipeline.virtual_stages=4"});
}

/// The sums of a micro-batch leave their bucket when the first gradient of the next is about to come into it.
TEST_F(VerifyTest, GradientsStreamedToTheHostOfOneBucket) {
  for (const char* size : {"zero.bucket_bytes=26214400", "zero.bucket_bytes=3000"}) {
    expect_passes("dp_replicate=2", "llama", {"zero.stage=2", "offload.optimizer=host", "offload.gradients=host", "precision.params=bf16", size});
    expect_passes("pp=2,dp_shard=2", "gpt2", {"zero.stage=2", "offload.optimizer=host", "offload.gradients=host", "pipeline.schedule=breadth_first", size});
  }
}

TEST_F(VerifyTest, OneRankAndTheDeterministicTreeAreBitForBit) {
  for (const char* mesh : {"dp_replicate=1", "dp_replicate=3", "dp_replicate=5"}) {
    const auto report = run(mesh, "llama", {"run.deterministic=true"});
    EXPECT_TRUE(report.bit_for_bit);
    for (const auto* list : {&report.initial_weights, &report.losses, &report.gradient_norms, &report.gradients, &report.weights}) {
      EXPECT_EQ(list->bound, 0);
      EXPECT_EQ(list->worst().value, 0) << mesh << "\n" << to_string(report);
    }
    EXPECT_EQ(report.forward.bit_equal, report.forward.compared);
    EXPECT_EQ(report.backward.bit_equal, report.backward.compared);
  }
  EXPECT_TRUE(run("dp_replicate=1").bit_for_bit);
  EXPECT_FALSE(run("dp_replicate=2").bit_for_bit);
}

TEST_F(VerifyTest, EveryModuleAndTensorIsCompared) {
  const auto report = run("dp_replicate=3", "mlp");
  // 7 micro-batches of: embedding, 2 blocks of (norm, w1, w2, feed-forward, dropout, block), norm, head, model. Padding is not among them.
  EXPECT_EQ(report.micro_batches, 7);
  EXPECT_EQ(report.forward.compared, report.steps * 7 * (1 + 2 * 6 + 3));
  EXPECT_EQ(report.backward.compared, report.forward.compared);
  EXPECT_EQ(report.gradients.each.size(), 2 * 6 + 1 + 2 + 1);
  EXPECT_EQ(report.weights.each.size(), report.gradients.each.size());
  EXPECT_EQ(report.initial_weights.each.size(), report.gradients.each.size());
  EXPECT_EQ(report.gradients.each.front().name, "embed_tokens.weight");
}

TEST_F(VerifyTest, OfLayersThatAreCutEveryModuleIsComparedOnEveryRank) {
  const auto whole = run("dp_replicate=1", "llama", {"model.kv_heads=2"});
  for (const char* sequence : {"tensor.sequence_parallel=false", "tensor.sequence_parallel=true"}) {
    const auto cut = run("tp=4", "llama", {"model.kv_heads=2", sequence});
    EXPECT_EQ(cut.forward.compared, 4 * whole.forward.compared);
    // Two ranks hold a key-value head together: their terms of the gradients of 2 layers' wk and wv are compared as one.
    EXPECT_EQ(cut.backward.compared, 4 * whole.backward.compared - cut.steps * cut.micro_batches * 2 * 2 * 2);
    EXPECT_EQ(cut.forward.unseen + cut.backward.unseen, 0);
  }
}

TEST_F(VerifyTest, OutputsBeyondTheBudgetAreHeldByTheirHashes) {
  const auto report = run("dp_replicate=2", "mlp", {}, {.output_bytes = 20000});
  EXPECT_TRUE(report.passed());
  EXPECT_EQ(report.forward.beyond_budget, 0);
  EXPECT_EQ(report.forward.bit_equal, report.forward.compared);
}

TEST(VerifyReport, WhatIsNotFiniteIsNullInJson) {
  VerifyReport report{.steps = 1};
  report.gradients = {.bound = 1e-5, .each = {{.name = "w", .value = std::numeric_limits<double>::infinity(), .step = 1}}};
  EXPECT_FALSE(report.passed());
  EXPECT_TRUE(to_json(report)["gradients"]["difference"].is_null());
  EXPECT_TRUE(to_json(report)["tensors"][0]["gradient"].is_null());
  EXPECT_THAT(to_string(report), HasSubstr("inf"));
  EXPECT_FALSE((VerifyReport{.steps = 2, .skipped = 2}).passed()) << "nothing was compared";
}

TEST_F(VerifyTest, WhatARankThrowsEndsTheWaitOfAll) {
  VerifyOptions options;
  options.plant.gradients = [](Composition&, int rank) { require(rank != 1, "planted failure"); };
  try {
    run("dp_replicate=3", "mlp", {}, options);
    FAIL() << "nothing was thrown";
  } catch (const ConfigError& refusal) {
    FAIL() << "a step that fails is no bad input: " << refusal.what();
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), HasSubstr("planted failure"));
  }
}

std::string refusal(const std::function<void()>& action) {
  try {
    action();
  } catch (const ConfigError& error) {
    return error.what();
  }
  return "nothing was refused";
}

TEST_F(VerifyTest, BadInputIsRefused) {
  EXPECT_THAT(refusal([] { parse_mesh("dp_replicat=3"); }), HasSubstr("no axis dp_replicat; did you mean dp_replicate?"));
  EXPECT_EQ(parse_mesh(" tp=2, pp=3").pp, 3);
  EXPECT_THAT(refusal([] { parse_mesh("tp=2,tp=2"); }), HasSubstr("tp is given twice"));
  for (const char* mesh : {"tp=0", "tp=-1", "tp=two", "tp=", "tp=2x"}) EXPECT_THAT(refusal([&] { parse_mesh(mesh); }), HasSubstr("expected a size")) << mesh;
  for (const char* mesh : {"", "tp", "tp=2,", ",tp=2", "tp=2, "}) EXPECT_THAT(refusal([&] { parse_mesh(mesh); }), HasSubstr("is no axis=size")) << mesh;
  EXPECT_THAT(refusal([&] { run("tp=2,dp_shard=2", "llama", {"zero.stage=3", "tensor.overlap=true", "zero.wrap=layers.*.attention.*"}); }),
              AllOf(HasSubstr("zero.wrap = layers.*.attention.*: makes 'layers.0.attention.wq' a unit by itself"), HasSubstr("tensor.overlap = false")));
  // Ranks of 7 and of 6 columns: three tiles and two, each of which would gather.
  EXPECT_THAT(refusal([&] { run("cp=2", "llama", {"zero.stage=3", "zero.wrap=**", "recompute.ffn_tile=3", "data.seq_len=13"}); }),
              AllOf(HasSubstr("zero.wrap = **: makes 'layers.0.feed_forward.w1' a unit by itself"), HasSubstr("set recompute.ffn_tile = 0")));
  EXPECT_THAT(refusal([&] { run("cp=2", "llama", {"zero.stage=3", "zero.wrap=layers.1", "recompute.ffn_tile=3", "data.seq_len=13"}); }),
              HasSubstr("zero.wrap = layers.1: leaves 'layers.0.feed_forward.w1' in no unit"));
  EXPECT_THAT(refusal([&] { run("dp_replicate=8"); }), HasSubstr("batch.global_size = 14"));
  EXPECT_THAT(refusal([&] { run("dp_replicate=257"); }), HasSubstr("at most 256"));
  EXPECT_THAT(refusal([&] { run("dp_shard=2"); }), HasSubstr("zero.stage"));
  EXPECT_THAT(refusal([&] { run("dp_replicate=2", "mlp", {"comm.backend=mpi"}); }), HasSubstr("comm.backend = mpi"));
  EXPECT_THAT(refusal([&] { run("dp_replicate=2", "mlp", {"comm.compression=powersgd"}); }), HasSubstr("comm.compression = powersgd"));
  EXPECT_THAT(refusal([&] { run("dp_replicate=2", "mlp", {}, {.steps = 7}); }), HasSubstr("--steps = 7"));
  EXPECT_THAT(refusal([&] { run("dp_replicate=2", "mlp", {}, {.steps = 0}); }), HasSubstr("--steps = 0"));
  const std::string nowhere = "checkpoint.dir=" + (folder_ / "nowhere").string();
  EXPECT_THAT(refusal([&] { run("dp_replicate=2", "mlp", {"checkpoint.resume=latest", nowhere}); }),
              AllOf(HasSubstr("checkpoint.resume = latest: checkpoint.dir = "), HasSubstr("holds no checkpoint that can be used")));
}

TEST(ParseMesh, NamesAxesInAnyOrder) {
  const auto mesh = parse_mesh("tp=2,dp_replicate=3,ep=2", {.order = {"tp", "pp", "cp", "dp_shard", "dp_replicate"}});
  EXPECT_EQ(mesh.tp, 2);
  EXPECT_EQ(mesh.dp_replicate, 3);
  EXPECT_EQ(mesh.dp_shard, 1);
  EXPECT_EQ(mesh.pp, 1);
  EXPECT_EQ(mesh.ep, 2);
  EXPECT_EQ(mesh.order.front(), "tp");
}

}  // namespace
}  // namespace tessera
