#include "tessera/launch/worker_plan.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tessera/core/error.h"

namespace tessera::launch {
namespace {

Round round_of(const std::vector<int>& nprocs) {
  Round round{.phase = Phase::Running, .number = 3, .master = {"h", 77}};
  for (const int nproc : nprocs) round.nodes.push_back({.id = "n" + std::to_string(round.nodes.size()), .nproc = nproc});
  return round;
}

TEST(WorkerPlan, NumbersRanksAcrossNodes) {
  for (const std::vector<int>& nprocs : std::vector<std::vector<int>>{{1}, {2, 1}, {1, 3, 1}, {8}}) {
    const Round round = round_of(nprocs);
    int expected = 0;
    for (const Node& node : round.nodes) {
      for (const WorkerPlan& plan : plan_workers({.command = {"p"}}, round, node.id, "")) {
        EXPECT_EQ(plan.rank, expected);
        EXPECT_EQ(plan.variables.at("RANK"), std::to_string(expected++));
        EXPECT_EQ(plan.variables.at("ROLE_RANK"), plan.variables.at("RANK"));
        EXPECT_EQ(plan.variables.at("LOCAL_WORLD_SIZE"), std::to_string(node.nproc));
      }
    }
    EXPECT_EQ(plan_workers({}, round, "n0", "").front().variables.at("WORLD_SIZE"), std::to_string(expected));
  }
}

TEST(WorkerPlan, SaysWhichAttemptItIs) {
  const JobOptions job{.command = {"p", "x"},
                       .variables = {{"OMP_NUM_THREADS", "5"}, {"RANK", "9"}, {"KEPT", "yes"}, {"TESSERA_JOB", "of whoever started us"}},
                       .run_id = "id",
                       .role = "trainer",
                       .max_restarts = 4};
  Round round = round_of({2, 2});
  round.job = "drawn";
  const WorkerPlan plan = plan_workers(job, round, "n1", "/records").at(1);
  const Variables expected{{"RANK", "3"},
                           {"LOCAL_RANK", "1"},
                           {"GROUP_RANK", "1"},
                           {"GROUP_WORLD_SIZE", "2"},
                           {"ROLE_NAME", "trainer"},
                           {"ROLE_WORLD_SIZE", "4"},
                           {"MASTER_ADDR", "h"},
                           {"MASTER_PORT", "77"},
                           {"TORCHELASTIC_RESTART_COUNT", "2"},
                           {"TORCHELASTIC_MAX_RESTARTS", "4"},
                           {"TORCHELASTIC_RUN_ID", "id"},
                           {"TESSERA_JOB", "drawn"},
                           {"TORCHELASTIC_USE_AGENT_STORE", "True"},
                           {"OMP_NUM_THREADS", "5"},
                           {"KEPT", "yes"},
                           {"TESSERA_RECORD_DIR", "/records"}};
  for (const auto& [name, value] : expected) EXPECT_EQ(plan.variables.at(name), value) << name;
}

TEST(StreamChoice, ReadsRanksAndStreams) {
  EXPECT_FALSE(StreamChoice().out(0));
  const StreamChoice all("3", "--tee");
  EXPECT_TRUE(all.out(5) && all.err(5));
  const StreamChoice some("0:1,2:2", "--tee");
  EXPECT_TRUE(some.out(0) && !some.err(0) && !some.out(1) && !some.err(1) && !some.out(2) && some.err(2));
  for (const char* text : {"", "4", "-1", "x", "0:", ":1", "0:4", "0:1,2"}) EXPECT_THROW(StreamChoice(text, "--tee"), ConfigError) << text;
}

TEST(WorkerPlan, FoldersGoOnFromThoseOfAJobBefore) {
  Round round{.number = 2, .nodes = {{.id = "a"}}};
  for (const int before : {0, 3}) {
    round.attempts_before = before;
    const auto plans = plan_workers({.command = {"x"}, .output = {.folder = "/logs", .keep_all = true}}, round, "a", "");
    EXPECT_EQ(plans[0].output.out.file, "/logs/attempt_" + std::to_string(before + 1) + "/0/stdout.log");
    EXPECT_EQ(plans[0].variables.at("TORCHELASTIC_RESTART_COUNT"), "1") << "of this job";
  }
}

TEST(OutputPlan, InheritsUnlessSomethingIsAsked) { EXPECT_EQ(plan_output({}, "default", 0, 3, 1), OutputPlan{}); }

TEST(OutputPlan, SendsStreamsWhereTheyBelong) {
  OutputOptions options{.folder = "d/id", .redirects = StreamChoice("1:1", "-r"), .tee = StreamChoice("1:2", "-t")};
  const OutputPlan plan = plan_output(options, "default", 2, 5, 1);
  EXPECT_EQ(plan.out, (StreamPlan{.captured = true, .console = false, .prefix = "", .file = "d/id/attempt_2/5/stdout.log"}));
  EXPECT_EQ(plan.err, (StreamPlan{.captured = true, .console = true, .prefix = "[default1]:", .file = "d/id/attempt_2/5/stderr.log"}));
  EXPECT_EQ(plan_output(options, "default", 2, 4, 0), OutputPlan{});

  const OutputPlan kept = plan_output({.folder = "d/id", .keep_all = true}, "default", 0, 0, 0);
  EXPECT_EQ(kept.out, (StreamPlan{.captured = true, .console = true, .prefix = "", .file = "d/id/attempt_0/0/stdout.log"}));
  const OutputPlan hidden = plan_output({.shown = {1}, .prefix = Prefix::Rank}, "default", 0, 0, 0);
  EXPECT_FALSE(hidden.out.console || hidden.err.console);
  EXPECT_EQ(plan_output({.prefix = Prefix::Rank}, "default", 0, 7, 0).out.prefix, "[rank 7] ");
  EXPECT_TRUE(plan_output({.capture_errors = true}, "default", 0, 0, 0).err.captured);
  EXPECT_FALSE(plan_output({.capture_errors = true}, "default", 0, 0, 0).out.captured);
}

}  // namespace
}  // namespace tessera::launch
