// What a plan says of a pipeline: its bubble, who has which share of the FLOPs, and what each rank holds.

#include "tessera/plan/pipeline_plan.h"

#include <numeric>

#include <gmock/gmock.h>

#include "tessera/comm/backends/record.h"
#include "tessera/plan/dry_run.h"
#include "tessera/plan/fit.h"
#include "tessera/plan/settings.h"
#include "tests/refusal.h"
#include "tests/train/fixture.h"

namespace tessera {
namespace {

using ::testing::AllOf;
using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using Sets = std::vector<std::string>;

class PipelinePlanTest : public testing_support::TrainFixture {
 protected:
  Config piped(Sets sets) const {
    sets.insert(sets.begin(), {"run.threads=1", "batch.micro_size=1", "batch.global_size=8", "model.layers=6", "run.steps=2"});
    return config("llama", sets);
  }

  struct Messages {
    int64_t count = 0, bytes = 0;
    bool operator==(const Messages&) const = default;
  };
  template <class Calls>
  static Messages tied_messages(const Calls& calls) {
    Messages found;
    for (const CollectiveEvent& call : calls) {
      if (call.site == "pipeline.tied" && (call.op == "send" || call.op == "recv")) ++found.count, found.bytes += call.bytes;
    }
    return found;
  }

  /// A tied model over two stages, unless `sets` say otherwise: peaks of every rank to the byte, and what the ends send each other (nothing, unless they
  /// are `apart`).
  void expect_as_planned(int world, Sets sets, bool apart = true) {
    sets.insert(sets.begin(), {"model.tie_embeddings=true", "mesh.pp=2", "run.steps=3"});
    SCOPED_TRACE(::testing::PrintToString(sets));
    const Config asked = piped(sets);
    const auto planned = plan::dry_run(asked, world, {.events = true});
    std::vector<int64_t> expected(static_cast<size_t>(world));
    Messages messages;
    for (const auto& ranks : planned.ranks) {
      ASSERT_EQ(ranks.count, std::ssize(ranks.examples));
      for (const int rank : ranks.examples) expected[static_cast<size_t>(rank)] = total_of(ranks.peak_bytes);
      const auto [count, bytes] = tied_messages(only<CollectiveEvent>(ranks.events));
      messages.count += count * ranks.count, messages.bytes += bytes * ranks.count;
    }
    EXPECT_EQ(messages.count > 0, apart);
    const auto recorder = std::make_shared<comm::Recorder>();
    decorators_ = {comm::recording(recorder)};
    std::vector<int64_t> real;
    for (int attempt = 0; attempt < 8 && real != expected; ++attempt) {  // Gloo's worker may hold on to a message for a moment after it is done
      recorder->clear();
      real = train(asked, world).peak_of_rank;
    }
    EXPECT_EQ(real, expected);
    messages.count *= asked.run.steps, messages.bytes *= asked.run.steps;
    EXPECT_EQ(tied_messages(recorder->records()), messages);
  }
};

TEST_F(PipelinePlanTest, ABubbleIsThatOfTheScheduleWhereStagesAreAlike) {
  // A head of little, so that four stages of blocks weigh the same.
  const Sets even{"mesh.pp=2",          "pipeline.split=[\"4\", \"4\"]", "data.tokenizer=byte", "model.dim=256",
                  "model.ffn_dim=1024", "model.vocab_size=256",          "model.heads=4",       "data.seq_len=4"};
  const auto idle = [&](const std::string& schedule, Sets more = {}) {
    more.insert(more.end(), even.begin(), even.end());
    more.push_back("pipeline.schedule=" + schedule);
    return plan::plan_pipeline(piped(more), 2).bubble_fraction;
  };
  const double bubble = idle("1f1b");
  EXPECT_NEAR(bubble, 1.0 / 9, 0.02);  // (p-1)/(m+p-1)
  EXPECT_NEAR(idle("gpipe"), bubble, 1e-9);
  EXPECT_NEAR(idle("naive"), 0.5, 1e-9);  // (p-1)/p, however unequal the stages
  EXPECT_LT(idle("zb_h1"), 0.8 * bubble);
  EXPECT_LE(idle("zb_2p"), idle("zb_h2"));
  EXPECT_GT(idle("1f1b", {"pipeline.costs=[1, 1, 1, 0.5]"}), bubble + 0.01) << "messages take time where they are said to";
}

/// The last stage is a norm, which the first of its tensor ranks counts, and a tied head, which the first stage counts.
TEST_F(PipelinePlanTest, ARankThatCountsNothingInTheNorm) {
  const auto planned = plan::dry_run(piped({"mesh.pp=2", "mesh.tp=2", "model.tie_embeddings=true", "pipeline.split=[\"7\", \"1\"]"}), 4);
  EXPECT_EQ(planned.ranks.size(), 4u);
}

TEST_F(PipelinePlanTest, SharesAndLinksOfStages) {
  const auto plan =
      plan::plan_pipeline(piped({"mesh.pp=2", "pipeline.schedule=zb_v", "pipeline.virtual_stages=2", "pipeline.split=[\"1\", \"3\", \"3\", \"1\"]"}), 2);
  ASSERT_EQ(plan.stages.size(), 4u);
  EXPECT_EQ(plan.stages[0].links, "embed_tokens");
  EXPECT_EQ(plan.stages[1].links, "layers.0-2");
  EXPECT_EQ(plan.stages[3].links, "head");
  EXPECT_EQ(plan.stages[0].flops_share, 0);
  EXPECT_EQ(plan.stages[1].flops_share, plan.stages[2].flops_share);
  EXPECT_NEAR(std::accumulate(plan.stages.begin(), plan.stages.end(), 0.0, [](double sum, const auto& stage) { return sum + stage.flops_share; }), 1, 1e-12);
  EXPECT_THAT(plan.stages_of(0), ElementsAre(0, 3));
  EXPECT_THAT(plan.stages_of(1), ElementsAre(1, 2));
}

TEST_F(PipelinePlanTest, TextAndJsonSayWhatRanksHold) {
  const auto run = plan::dry_run(piped({"mesh.pp=2", "mesh.dp_shard=2", "zero.stage=1"}), 4);
  const auto json = plan::to_json(run);
  EXPECT_EQ(json.at("bubble_fraction"), run.pipeline.bubble_fraction);
  EXPECT_EQ(json.at("pipeline").at("schedule"), "1f1b");
  EXPECT_EQ(json.at("pipeline").at("micro_batches"), 4);
  EXPECT_EQ(json.at("pipeline").at("stages").at(1).at("links"), "layers.3-5, head");
  double flops = 0;
  for (const auto& ranks : json.at("ranks")) {
    const bool first = ranks.at("stages") == nlohmann::json{0};
    EXPECT_EQ(ranks.at("kept_alive"), first ? 2 : 1);
    flops += ranks.at("count").get<double>() * ranks.at("flops").get<double>();
  }
  const auto whole = plan::dry_run(piped({}), 1);
  EXPECT_NEAR(flops, whole.ranks.front().flops, 1e-9 * flops) << "the stages' together are the model's";
  EXPECT_EQ(plan::to_json(whole).at("bubble_fraction"), 0);
  EXPECT_THAT(plan::to_string(run), AllOf(HasSubstr("pipeline 1f1b: 2 stages, 4 micro-batches"), HasSubstr("stage 0, activations of at most 2 micro-batches"),
                                          HasSubstr("layers.3-5, head")));
}

TEST_F(PipelinePlanTest, PeaksAreThoseOfTheRun) {
  expect_as_planned(2, {"pipeline.schedule=zb_v", "pipeline.virtual_stages=2"}, /*apart=*/false);
  expect_as_planned(2, {"pipeline.schedule=zb_auto", "pipeline.memory_limit=2"});
}

/// What the ends of a tied embedding send each other, and the room for it. Uneven cuts: parts of the two ends meet at other offsets, and in V's on one rank.
TEST_F(PipelinePlanTest, TiedCopiesAreForetold) {
  const Sets v{"pipeline.schedule=zb_v", "pipeline.virtual_stages=2"};
  const auto with = [](Sets sets, const Sets& more) {
    sets.insert(sets.end(), more.begin(), more.end());
    return sets;
  };
  expect_as_planned(2, {});
  expect_as_planned(2, v, /*apart=*/false);
  expect_as_planned(3, {"mesh.pp=3", "pipeline.split=[\"1\", \"5\", \"2\"]"});
  expect_as_planned(4, {"mesh.dp_replicate=2"});
  expect_as_planned(4, {"mesh.tp=2"});
  expect_as_planned(2, {"pipeline.schedule=pipedream", "pipeline.vertical_sync=true", "optim.max_grad_norm=0"});
  expect_as_planned(2, {"pipeline.post_validate=true"});
  expect_as_planned(2, with(v, {"pipeline.post_validate=true"}), /*apart=*/false);
  for (const std::string stage : {"zero.stage=1", "zero.stage=2", "zero.stage=3"}) {
    expect_as_planned(4, {"mesh.dp_shard=2", stage});
    expect_as_planned(6, {"mesh.dp_shard=3", stage, "zero.bucket_bytes=20000", "pipeline.split=[\"2\", \"6\"]"});
    expect_as_planned(6, with(v, {"mesh.dp_shard=3", stage}));
    expect_as_planned(4, {"mesh.dp_shard=2", stage, "pipeline.post_validate=true"});
  }
  expect_as_planned(8, {"mesh.tp=2", "mesh.dp_shard=2", "zero.stage=1", "model.kv_heads=2"});
}

TEST_F(PipelinePlanTest, WhatFitsIsLookedForAmongPipelines) {
  EXPECT_THAT(plan::cheaper_settings(piped({"mesh.pp=2", "pipeline.schedule=gpipe"}), 2),
              Contains(Sets{"pipeline.schedule=1f1b", "pipeline.virtual_stages=1"}));
  EXPECT_THAT(plan::cheaper_settings(piped({"mesh.pp=2"}), 2), Contains(Sets{"pipeline.schedule=v_min", "pipeline.virtual_stages=2"}));
  EXPECT_THAT(plan::cheaper_settings(piped({}), 2), Contains(Sets{"mesh.pp=2"}));
  EXPECT_THAT(plan::cheaper_settings(piped({"batch.global_size=7"}), 2), ::testing::Not(Contains(Sets{"mesh.pp=2"}))) << "too few micro-batches";
  const auto peak = [&](const Sets& sets) { return total_of(plan::largest_class(plan::dry_run(piped(sets), 2)).peak_bytes); };
  const Sets piped_sets{"mesh.pp=2", "pipeline.schedule=gpipe"};
  const auto found = plan::find_fit(piped(piped_sets), 2, peak(piped_sets) - 1);
  ASSERT_TRUE(found.fits);
  EXPECT_EQ(plan::flags_of(found.best()->sets), "--set pipeline.schedule=1f1b --set pipeline.virtual_stages=1");
}

TEST_F(PipelinePlanTest, ASplitThatDoesNotFitIsRefused) {
  EXPECT_THAT(testing_support::refusal([&] { plan::plan_pipeline(piped({"mesh.pp=2", "pipeline.split=[\"1\", \"1\"]"}), 2); }), HasSubstr("pipeline.split"));
}

/// Each version is of what updates change.
TEST_F(PipelinePlanTest, WhatIsFrozenHasOneVersionWithoutAFlush) {
  const auto parameters = [&](const std::string& schedule, const std::string& modules) {
    const Config made = config("llama", {"mesh.pp=3", "model.layers=6", "batch.global_size=6", "batch.micro_size=1", "run.threads=1", "optim.max_grad_norm=0",
                                         "pipeline.schedule=" + schedule, "lora.modules=" + modules, "lora.rank=1"});
    return plan::dry_run(made, 3).ranks.front().peak_bytes[static_cast<int>(MemoryCategory::Parameters)];
  };
  const std::string adapted = "layers.*.attention.wq";
  const auto frozen = parameters("1f1b", adapted), versions = parameters("pipedream", adapted);
  EXPECT_GT(versions, frozen);
  EXPECT_LT(versions, 1.1 * static_cast<double>(frozen)) << "of adapters alone";
  EXPECT_GT(parameters("pipedream", ""), 2 * parameters("1f1b", ""));
}

}  // namespace
}  // namespace tessera
