// Whatever orders a pipeline's step, by name or from a file, trains as one device does; and what does not fit the run is refused before it begins.

#include <fstream>

#include <ATen/ops/equal.h>
#include <gmock/gmock.h>

#include "tessera/mesh/mesh.h"
#include "tessera/pipeline/schedules/csv.h"
#include "tessera/pipeline/schedules/generators.h"
#include "tessera/pipeline/schedules/lower.h"
#include "tessera/pipeline/schedules/timed.h"
#include "tessera/train/pipeline_layout.h"
#include "tessera/train/stage_costs.h"
#include "tests/comm/order_alone.h"
#include "tests/refusal.h"
#include "tests/train/pipeline_fixture.h"

namespace tessera {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::StartsWith;

class PipelineSchedules : public testing_support::PipelineFixture {
 protected:
  static Sets scheduled(const std::string& schedule, int ranks, int chunks = 1) {
    return {"mesh.pp=" + std::to_string(ranks), "pipeline.schedule=" + schedule, "pipeline.virtual_stages=" + std::to_string(chunks)};
  }

  std::string file(const std::string& text, const std::string& name = "mine.csv") const {
    const auto path = folder_ / name;
    std::ofstream(path) << text;
    return path.string();
  }
  std::string file(const schedules::Schedule& schedule) const { return file(to_csv(schedule)); }

  std::string refused(const Sets& sets, int world) const {
    return testing_support::refusal([&] {
      const Config asked = piped("llama", sets);
      validate(asked, world);
      check_pipeline(asked, mesh_shape(asked.mesh, asked.zero.stage, world));
    });
  }

  static void expect_same_bits(const Trace& got, const Trace& want) {
    for (const auto& [name, gradient] : want.gradients) EXPECT_TRUE(at::equal(got.gradients.at(name), gradient)) << name;
    for (size_t step = 0; step < want.steps.size(); ++step) EXPECT_EQ(got.steps[step].loss, want.steps[step].loss);
  }
};

TEST_F(PipelineSchedules, EachNameEqualsOneDevice) {
  const Trace one = trace_of("llama", 1, {});
  for (const auto& name : {"zb_h2", "zb_1p", "zb_2p"}) expect_alike(trace_of("llama", 3, scheduled(name, 3)), one, {name});
  for (const auto& name : {"v_half", "v_min"}) expect_alike(trace_of("llama", 2, scheduled(name, 2, 2)), one, {name});
  Sets limited = scheduled("zb_auto", 2);
  limited.insert(limited.end(), {"pipeline.memory_limit=3", "pipeline.costs=[1, 1.2, 0.8, 0.1]"});
  expect_alike(trace_of("llama", 2, limited), one, limited);
}

/// On an engine that matches messages by their order alone, as NCCL does.
TEST_F(PipelineSchedules, TrainWhereMessagesMeetByTheirOrderAlone) {
  const Sets tied{"model.tie_embeddings=true"};
  const Trace one = trace_of("llama", 1, {}), one_tied = trace_of("llama", 1, {}, tied);
  decorators_ = {testing_support::order_alone()};
  for (const auto& name : {"naive", "gpipe", "1f1b", "zb_h1", "zb_2p"}) expect_alike(trace_of("llama", 3, scheduled(name, 3)), one, {name});
  for (const auto& name : {"interleaved", "breadth_first", "zb_v", "v_half"}) expect_alike(trace_of("llama", 2, scheduled(name, 2, 2)), one, {name});
  const auto beside = [&](Sets layout, const Sets& more) {
    layout.insert(layout.end(), more.begin(), more.end());
    return layout;
  };
  for (const auto& [layout, ranks] : std::vector<std::pair<Sets, int>>{{scheduled("1f1b", 2), 2},
                                                                       {scheduled("zb_v", 2, 2), 2},
                                                                       {beside(scheduled("1f1b", 2), {"mesh.dp_shard=2", "zero.stage=1"}), 4},
                                                                       {beside(scheduled("zb_v", 2, 2), {"mesh.dp_shard=2", "zero.stage=3"}), 4},
                                                                       {beside(scheduled("interleaved", 2, 2), {"mesh.tp=2"}), 4}}) {
    expect_alike(trace_of("llama", ranks, layout, tied), one_tied, layout);
  }
}

/// With one micro-batch a rank of several stages receives before it has sent anything.
TEST_F(PipelineSchedules, OneMicroBatchWhereMessagesMeetByTheirOrderAlone) {
  const Sets single{"batch.global_size=1"};
  const Trace one = trace_of("llama", 1, {}, single);
  decorators_ = {testing_support::order_alone()};
  for (const auto& [name, ranks, chunks] : std::vector<std::tuple<const char*, int, int>>{
           {"gpipe", 3, 1}, {"1f1b", 3, 1}, {"breadth_first", 2, 2}, {"breadth_first", 3, 2}, {"zb_v", 2, 2}, {"v_min", 3, 2}}) {
    expect_alike(trace_of("llama", ranks, scheduled(name, ranks, chunks), single), one, scheduled(name, ranks, chunks));
  }
}

/// Rings of sequences and of layers send beside the stages, and each by itself.
TEST_F(PipelineSchedules, RingsWhereMessagesMeetByTheirOrderAlone) {
  const Sets sets{"batch.global_size=4", "model.kv_heads=2"};
  const Trace one = trace_of("llama", 1, {}, sets);
  decorators_ = {testing_support::order_alone()};
  const std::string sequence = "tensor.sequence_parallel=true", overlap = "tensor.overlap=true";
  for (const auto& [ranks, layout] : std::vector<std::pair<int, Sets>>{{2, {"mesh.cp=2"}},
                                                                       {4, {"mesh.cp=2", "mesh.pp=2"}},
                                                                       {4, {"mesh.cp=4", "context.method=ulysses_ring", "context.ulysses=2"}},
                                                                       {8, {"mesh.cp=4", "mesh.pp=2", "pipeline.schedule=zb_v", "pipeline.virtual_stages=2"}},
                                                                       {2, {"mesh.tp=2", sequence, overlap}},
                                                                       {4, {"mesh.tp=2", "mesh.pp=2", sequence, overlap}},
                                                                       {4, {"mesh.tp=2", "mesh.cp=2", sequence, overlap}},
                                                                       {4, {"mesh.tp=4", sequence, overlap}}}) {
    expect_alike(trace_of("llama", ranks, layout, sets), one, layout);
  }
}

TEST_F(PipelineSchedules, FixedTreesGiveTheBitsOfOneDevice) {
  const Sets sets{"run.deterministic=true", "batch.global_size=4"};
  const Trace one = trace_of("gpt2", 1, {}, sets);
  for (const auto& [name, chunks] : {std::pair("1f1b", 1), {"zb_h2", 1}, {"zb_2p", 1}, {"v_half", 2}, {"v_min", 2}, {"dualpipev", 2}}) {
    SCOPED_TRACE(name);
    expect_same_bits(trace_of("gpt2", 2, scheduled(name, 2, chunks), sets), one);
  }
}

/// Ranks with fewer micro-batches than others fill up, so a schedule of one number fits all.
TEST_F(PipelineSchedules, AFileOfTheLargestShareFitsEveryDataRank) {
  const Sets sets{"batch.global_size=5"};
  const std::string mine = file("0F0,0F1,0F2,,0B0,0B1,0B2\n1F0,1B0,1F1,1B1,1F2,1B2\n");
  expect_alike(trace_of("llama", 4, scheduled(mine, 2), sets), trace_of("llama", 1, {}, sets), {mine});
  EXPECT_THAT(refused({"mesh.pp=2", "pipeline.schedule=" + mine, "batch.global_size=8"}, 4),
              AllOf(StartsWith("pipeline.schedule = " + mine + ": has 3 micro-batches, and a step gives each data rank 4"), HasSubstr("rounded up")));
}

/// Messages are the engine's own; parameters are gathered and gradients reduced by whatever shards them, where it does so.
TEST_F(PipelineSchedules, AFileAsPyTorchWritesItGivesTheBitsOfTheSameByName) {
  const Sets sharded{"mesh.dp_shard=2", "zero.stage=3", "batch.global_size=8"};
  const Trace by_name = trace_of("llama", 4, scheduled("dualpipev", 2, 2), sharded);
  const auto schedule = schedules::lower(schedules::dualpipev(2, 4), {.reduce_gradients = true, .unsharded_stages = 1});
  const std::string text = to_csv(schedule);
  for (const char* entry : {"OVERLAP_F_B", "UNSHARD", "RESHARD", "REDUCE_GRAD", "SEND_F", "RECV_B"}) EXPECT_THAT(text, HasSubstr(entry));
  expect_same_bits(trace_of("llama", 4, scheduled(file(schedule), 2, 2), sharded), by_name);
}

/// Some backwards whole and some in halves, on one stage: gradients are reduced behind the last of either.
TEST_F(PipelineSchedules, MixedBackwardsMeetUnderEverySharding) {
  const Trace one = trace_of("llama", 1, {}, {"batch.global_size=8"});
  for (const char* stage : {"zero.stage=0", "zero.stage=1", "zero.stage=2", "zero.stage=3"}) {
    Sets layout = scheduled("dualpipev", 2, 2);
    layout.insert(layout.end(), {stage, "batch.global_size=8"});
    expect_alike(trace_of("llama", 4, layout), one, layout);
  }
}

/// Any rank may hold any stages, and not each as many.
TEST_F(PipelineSchedules, AFilePlacesStagesAsItLikes) {
  const std::string mine = file("0F0,1F0,3F0,3B0,1B0,0B0,0F1,1F1,3F1,3B1,1B1,0B1\n2F0,2B0,2F1,2B1\n");
  expect_one_device("llama", 2, scheduled(mine, 2, 2), {"batch.global_size=2", "model.tie_embeddings=true"});
}

TEST_F(PipelineSchedules, WhatAFileLacksIsRefusedBeforeTheRun) {
  const auto of = [&](const std::string& text, Sets more = {}, int world = 2) {
    more.insert(more.begin(), {"mesh.pp=2", "pipeline.schedule=" + file(text), "batch.global_size=2"});
    std::string sentence = refused(more, world);
    EXPECT_THAT(sentence, StartsWith("pipeline."));
    return sentence;
  };
  EXPECT_THAT(
      of("0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0\n"),
      HasSubstr("mine.csv: row 1 (rank 0), column 2: deadlock: rank 0 is at 0B0, which needs 1B0 of rank 1; rank 1 is at 1F1, which needs 0F1 of rank 0"));
  EXPECT_THAT(of("0F0,0F1,0B0,0B1\n1F0,1B0,1F1\n"), HasSubstr("row 2 (rank 1): 1B1 is missing"));
  EXPECT_THAT(of("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1,1F1\n"), HasSubstr("row 2 (rank 1), column 5: 1F1 is done a second time"));
  EXPECT_THAT(of("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,oops\n"), HasSubstr("row 2 (rank 1), column 4: "));
  EXPECT_THAT(of("0F0,0B0\n1F0,1B0\n"), HasSubstr("has 1 micro-batches, and a step gives each data rank 2"));
  EXPECT_THAT(of("0F0,0B0,0F1,0B1\n1F0,1B0,1F1,1B1\n2F0,2B0,2F1,2B1\n"), HasSubstr("has 3 rows, one a rank, and mesh.pp = 2; set mesh.pp = 3"));
  EXPECT_THAT(of("0F0,2F0,2B0,0B0,0F1,2F1,2B1,0B1\n1F0,1B0,1F1,1B1\n"), HasSubstr("has 3 stages on 2 ranks"));
  EXPECT_THAT(of("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n", {"pipeline.virtual_stages=2"}), HasSubstr("set pipeline.virtual_stages = 1"));
  EXPECT_THAT(of("0F0,0B0,0UPDATE0@1,0F1@1,0B1@1\n1F0,1B0,1UPDATE0@1,1F1@1,1B1@1\n"), HasSubstr("updates weights in the middle of a step"));
  EXPECT_THAT(of("0F0,0F1,0B0,0B1,0REDUCE_GRAD,0REDUCE_GRAD\n1F0,1B0,1F1,1B1\n"), HasSubstr("0REDUCE_GRAD is done a second time"));
  EXPECT_THAT(of(""), HasSubstr("holds no action"));
}

/// The tree takes micro-batches in their order; without it any order trains.
TEST_F(PipelineSchedules, AnotherOrderOfMicroBatchesIsRefusedWhereTheOrderIsOfTheBits) {
  const std::string reversed = file("0F0,0F1,0B1,0B0\n1F0,1F1,1B1,1B0\n");
  expect_one_device("llama", 2, {"mesh.pp=2", "pipeline.schedule=" + reversed}, {"batch.global_size=2", "batch.micro_size=1"});
  EXPECT_THAT(refused({"mesh.pp=2", "pipeline.schedule=" + reversed, "batch.global_size=2", "batch.micro_size=1", "run.deterministic=true"}, 2),
              AllOf(StartsWith("run.deterministic = true: "), HasSubstr("of micro-batch 0 behind that of 1 on stage ")));
}

TEST_F(PipelineSchedules, NamesThatAreNoneAndKeysThatAreMissingAreRefused) {
  EXPECT_THAT(refused({"mesh.pp=2", "pipeline.schedule=1fb1"}, 2), AllOf(HasSubstr("there is no such file, and no schedule '1fb1'; did you mean 1f1b?")));
  EXPECT_THAT(refused({"mesh.pp=2", "pipeline.schedule=" + folder_.string()}, 2), HasSubstr("is a folder"));
  EXPECT_THAT(refused({"mesh.pp=2", "pipeline.schedule=zb_auto"}, 2), StartsWith("pipeline.memory_limit = 0: pipeline.schedule = zb_auto is made for a limit"));
  EXPECT_THAT(refused({"mesh.pp=2", "pipeline.schedule=v_half"}, 2), HasSubstr("set pipeline.virtual_stages = 2"));
  EXPECT_THAT(refused({"mesh.pp=2", "pipeline.schedule=zb_1p", "pipeline.costs=[1, 2]"}, 2), StartsWith("pipeline.costs = [1.0, 2.0]: expected the times"));
  EXPECT_THAT(refused({"mesh.pp=2", "pipeline.memory_limit=-1"}, 2), StartsWith("pipeline.memory_limit = -1"));
}

/// Before a schedule is made for them, stages are counted as a step counts itself.
TEST_F(PipelineSchedules, CostsAreTheFlopsOfTheStages) {
  for (const Sets& sets : {Sets{"pipeline.split=[\"1\", \"3\", \"4\"]"}, Sets{"recompute.mode=full", "model.dropout=0.1"}}) {
    SCOPED_TRACE(sets.front());
    Sets all = sets;
    all.push_back("mesh.pp=3");
    const Config asked = piped("gpt2", all);
    const auto flops = stage_flops(asked, pipeline_layout(asked, 3));
    double total = 0;
    for (const StageFlops& stage : flops) total += stage.total();
    EXPECT_EQ(6 * total, trace_of("gpt2", 1, {}, sets).steps.front().flops.run);
    const auto costs = costs_of(asked.pipeline, flops);
    double forward = 0;
    for (size_t i = 0; i < costs.stages.size(); ++i) {
      forward += costs.stages[i].forward;
      EXPECT_NEAR(costs.stages[i].backward * flops[i].forward, costs.stages[i].forward * (flops[i].backward_input + flops[i].backward_weight), 1e-3);
    }
    EXPECT_NEAR(forward, 3, 1e-12);
    if (sets.size() == 1) EXPECT_EQ(costs.stages[0].forward, 0);  // an embedding multiplies nothing
  }
  // Each kind by itself: a stage whose gradients are made in forward is expensive there and cheap in backward.
  const auto given =
      costs_of(piped("llama", {"pipeline.costs=[2, 3, 1, 0.5]"}).pipeline, {{.forward = 1, .backward_input = 2, .backward_weight = 1}, {.forward = 3}});
  const auto of_stage = [&](size_t i) { return std::tuple(given.stages[i].forward, given.stages[i].backward_input, given.stages[i].backward_weight); };
  EXPECT_EQ(of_stage(0), std::tuple(1, 6, 2));
  EXPECT_EQ(of_stage(1), std::tuple(3, 0, 0));
  EXPECT_EQ(given.communication, 0.5);
}

/// What one run has measured, another is made for; a backward that was timed whole is cut as its FLOPs are.
TEST_F(PipelineSchedules, CostsAreReadFromATimeline) {
  const schedules::Schedule ran = schedules::one_f_one_b(2, 3);
  const schedules::Costs real{.stages = {{.forward = 2, .backward = 6}, {.forward = 3, .backward = 4}}};
  schedules::Timed timed{.schedule = ran, .timeline = simulate(ran, real), .step = 4};
  for (const auto& actions : ran.actions) {
    timed.asked.emplace_back(actions.size());
    timed.collectives.emplace_back(actions.size());
  }
  for (size_t rank = 0; rank < 2; ++rank) {
    for (size_t i = 0; i < timed.asked[rank].size(); ++i) timed.asked[rank][i] = timed.timeline[rank][i].start;
  }
  const auto file = folder_ / "timeline.jsonl";
  std::ofstream(file) << to_json(timed) << "\n";
  const Config config = piped("llama", {"pipeline.costs_from=" + file.string()});
  const auto costs =
      costs_of(config.pipeline, {{.forward = 1, .backward_input = 1, .backward_weight = 2}, {.forward = 1, .backward_input = 3, .backward_weight = 1}});
  ASSERT_EQ(costs.stages.size(), 2);
  EXPECT_EQ(std::tuple(costs.stages[0].forward, costs.stages[0].backward, costs.stages[0].backward_input, costs.stages[0].backward_weight),
            std::tuple(2, 6, 2, 4));
  EXPECT_EQ(std::tuple(costs.stages[1].forward, costs.stages[1].backward, costs.stages[1].backward_input, costs.stages[1].backward_weight),
            std::tuple(3, 4, 3, 1));
  EXPECT_THAT(refused({"mesh.pp=3", "pipeline.schedule=zb_1p", "pipeline.costs_from=" + file.string()}, 3),
              HasSubstr("was measured with 2 stages, and this run has 3"));
  EXPECT_THAT(refused({"mesh.pp=2", "pipeline.schedule=zb_1p", "pipeline.costs_from=nowhere"}, 2), HasSubstr("nowhere: there is no such run or file"));
  EXPECT_THAT(refused({"mesh.pp=2", "pipeline.schedule=zb_1p", "pipeline.kept=0"}, 2), StartsWith("pipeline.kept = 0.0: a share"));
}

/// Cut by FLOPs, the slowest stage is as fast as any cut makes it.
TEST_F(PipelineSchedules, ASplitByCostHasTheCheapestSlowestStage) {
  const Config by_cost = piped("llama", {"mesh.pp=3", "pipeline.split=[\"cost\"]", "model.vocab_size=2000"});
  const auto slowest = [&](const PipelineLayout& layout) {
    double most = 0;
    for (const StageFlops& stage : stage_flops(by_cost, layout)) most = std::max(most, stage.total());
    return most;
  };
  const double best = slowest(pipeline_layout(by_cost, 3));
  const int64_t links = by_cost.model.layers + 2;
  for (int64_t first = 1; first < links - 1; ++first) {
    for (int64_t second = first + 1; second < links; ++second) {
      EXPECT_LE(best, slowest({.links = {{0, first}, {first, second}, {second, links}}, .rank_of = {0, 1, 2}}));
    }
  }
}

/// The embedding and the head on one rank: one parameter, whatever shards or cuts it.
TEST_F(PipelineSchedules, TiedEmbeddingsOfOneRankAreOneParameter) {
  const Sets tied{"model.tie_embeddings=true"};
  const Trace one = trace_of("llama", 1, {}, tied);
  for (const auto& name : {"zb_v", "v_half", "v_min", "dualpipev"}) expect_alike(trace_of("llama", 2, scheduled(name, 2, 2), tied), one, {name});
  const auto with = [&](const std::string& name, Sets more) {
    const Sets layout = scheduled(name, 2, 2);
    more.insert(more.end(), layout.begin(), layout.end());
    return more;
  };
  for (const char* stage : {"zero.stage=1", "zero.stage=2", "zero.stage=3"}) {
    const Sets layout = with("zb_v", {"mesh.dp_shard=3", stage});
    expect_alike(trace_of("llama", 6, layout, tied), one, layout);
  }
  const Sets cut = with("v_half", {"mesh.tp=2"}), both = with("zb_v", {"mesh.tp=2", "mesh.dp_shard=2", "zero.stage=3"});
  expect_alike(trace_of("llama", 4, cut, tied), one, cut);
  expect_alike(trace_of("llama", 8, both, tied), one, both);
}

}  // namespace
}  // namespace tessera
