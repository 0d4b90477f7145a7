#include "tessera/launch/run_options.h"

#include <map>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tessera/core/error.h"

namespace tessera::launch {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr Devices devices{.cpus = 6, .gpus = 0};

AgentOptions parse(std::vector<std::string> arguments, const std::map<std::string, std::string>& environment = {}) {
  arguments.emplace_back("prog");
  return parse_run(
      arguments,
      [&](const std::string& name) {
        const auto found = environment.find(name);
        return found == environment.end() ? std::nullopt : std::optional(found->second);
      },
      devices);
}

std::string refusal(const std::vector<std::string>& arguments, const std::map<std::string, std::string>& environment = {}) {
  try {
    parse(arguments, environment);
  } catch (const ConfigError& error) {
    return error.what();
  }
  return "accepted";
}

TEST(RunOptions, ReadTheClassicLine) {
  const std::vector<std::vector<std::string>> spellings{
      {"--nnodes=2", "--nproc_per_node=8", "--rdzv_id=100", "--rdzv_backend=c10d", "--rdzv_endpoint=h:29400"},
      {"--nnodes=2", "--nproc-per-node=8", "--rdzv-id=100", "--rdzv-backend=c10d", "--rdzv-endpoint=h:29400"},
      {"--nnodes", "2", "--nproc_per_node", "8", "--rdzv_id", "100", "--rdzv_backend", "c10d", "--rdzv_endpoint", "h"},
      {"--nnodes", "2:2", "--nproc-per_node", "8", "--rdzv-id", "100", "--rdzv-endpoint", "h", "--"},
  };
  for (const auto& line : spellings) {
    const AgentOptions options = parse(line);
    EXPECT_EQ(options.rendezvous.rules.min_nodes, 2);
    EXPECT_EQ(options.rendezvous.rules.max_nodes, 2);
    EXPECT_EQ(options.rendezvous.nproc, 8);
    EXPECT_EQ(options.rendezvous.run_id, "100");
    EXPECT_EQ(options.rendezvous.endpoint, (comm::Endpoint{"h", 29400}));
    EXPECT_FALSE(options.master_is_rendezvous);
    EXPECT_THAT(options.job.command, ElementsAre("prog"));
  }
}

TEST(RunOptions, LeaveTheProgramItsFlags) {
  EXPECT_THAT(parse_run(
                  {"-m", "pkg.train", "--nnodes=3", "-t", "--"}, [](const std::string&) { return std::nullopt; }, devices)
                  .job.command,
              ElementsAre("python3", "-u", "-m", "pkg.train", "--nnodes=3", "-t", "--"));
  EXPECT_THAT(
      parse_run(
          {"train.py", "--help"}, [](const std::string& name) { return name == "PYTHON_EXEC" ? std::optional<std::string>("py") : std::nullopt; }, devices)
          .job.command,
      ElementsAre("py", "-u", "train.py", "--help"));
  EXPECT_THAT(parse_run({"--no_python", "--", "train.py"}, [](const std::string&) { return std::nullopt; }, devices).job.command, ElementsAre("train.py"));
  EXPECT_THAT(parse_run({"--", "-odd"}, [](const std::string&) { return std::nullopt; }, devices).job.command, ElementsAre("-odd"));
}

TEST(RunOptions, KnowWhereAgentsMeet) {
  EXPECT_FALSE(parse({}).rendezvous.endpoint);
  EXPECT_FALSE(parse({"--standalone", "--rdzv-endpoint=h:1"}).rendezvous.endpoint);
  EXPECT_FALSE(parse({"--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"}).rendezvous.endpoint);
  EXPECT_EQ(parse({"--nnodes=1:4", "--rdzv-endpoint=[::1]:5"}).rendezvous.endpoint, (comm::Endpoint{"::1", 5}));
  EXPECT_EQ(parse({"--nnodes=1:4", "--rdzv-endpoint=::1"}).rendezvous.endpoint, (comm::Endpoint{"::1", 29400}));

  const AgentOptions fixed = parse({"--nnodes=2", "--node_rank=1", "--master_addr=a", "--master_port=7"});
  EXPECT_EQ(fixed.rendezvous.endpoint, (comm::Endpoint{"a", 7}));
  EXPECT_EQ(fixed.rendezvous.node_rank, 1);
  EXPECT_TRUE(fixed.master_is_rendezvous);
  EXPECT_EQ(parse({"--nnodes=2"}).rendezvous.endpoint, (comm::Endpoint{"127.0.0.1", 29500}));
}

TEST(RunOptions, TakeVariablesWhereTheLineIsSilent) {
  const std::map<std::string, std::string> environment{{"PET_NNODES", "1:3"},     {"PET_NPROC_PER_NODE", "cpu"}, {"PET_RDZV_ENDPOINT", "h:9"},
                                                       {"PET_MAX_RESTARTS", "4"}, {"PET_NO_PYTHON", "0"},        {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "7"}};
  const AgentOptions options = parse({"--nnodes=1:2"}, environment);
  EXPECT_EQ(options.rendezvous.rules.max_nodes, 2);
  EXPECT_EQ(options.rendezvous.nproc, 6);
  EXPECT_EQ(options.rendezvous.endpoint, (comm::Endpoint{"h", 9}));
  EXPECT_EQ(options.rendezvous.rules.max_restarts, 4);
  EXPECT_EQ(options.grace_s, 7);
  EXPECT_EQ(parse({"--grace=2"}, environment).grace_s, 2);
  EXPECT_THROW(parse({"--grace=inf"}, environment), ConfigError);  // clocks count nanoseconds in 64 bits
  for (const std::string off : {"", "0"}) EXPECT_NO_THROW(parse({"--nnodes=2", "--rdzv-endpoint=h:9"}, {{"PET_STANDALONE", off}})) << "a switch that is off";
  EXPECT_THAT(refusal({"--nnodes=2"}, {{"PET_STANDALONE", "1"}}), HasSubstr("--standalone: one node"));
}

TEST(RunOptions, ReadRendezvousSettings) {
  const AgentOptions options = parse({"--rdzv-conf", "join_timeout=12,last_call_timeout=0.5,keep_alive_interval=0.1,keep_alive_max_attempt=20,is_host=false"});
  EXPECT_EQ(options.rendezvous.rules.join_timeout_s, 12);
  EXPECT_EQ(options.rendezvous.rules.last_call_s, 0.5);
  EXPECT_EQ(options.heartbeat_s, 0.1);
  EXPECT_DOUBLE_EQ(options.rendezvous.rules.dead_after_s, 2);
  EXPECT_EQ(options.rendezvous.serves, false);
  EXPECT_EQ(parse({"--rdzv-conf=timeout=5"}).rendezvous.rules.join_timeout_s, 5);
  EXPECT_EQ(parse({"--rdzv-conf=last_call_timeout=1, join_timeout = 7"}).rendezvous.rules.join_timeout_s, 7) << "torchrun takes blanks";
}

TEST(RunOptions, CountDevices) {
  const auto nproc = [](const char* text, Devices has) {
    return parse_run({"--nproc-per-node", text, "p"}, [](const std::string&) { return std::nullopt; }, has).rendezvous.nproc;
  };
  EXPECT_EQ(nproc("auto", {.cpus = 6, .gpus = 0}), 6);
  EXPECT_EQ(nproc("auto", {.cpus = 6, .gpus = 2}), 2);
  EXPECT_EQ(nproc("cpu", {.cpus = 6, .gpus = 2}), 6);
  EXPECT_EQ(nproc("gpu", {.cpus = 6, .gpus = 2}), 2);
  EXPECT_THAT(refusal({"--nproc-per-node=gpu"}), HasSubstr("no GPU"));
}

TEST(RunOptions, RefuseByName) {
  const std::vector<std::pair<std::vector<std::string>, std::string>> cases{
      {{"--nproc_pr_node=2"}, "--nproc_pr_node: no such flag; the nearest is --nproc-per-node"},
      {{"-x"}, "-x: no such flag"},
      {{"--nnodes"}, "--nnodes = prog"},
      {{"--nnodes=0"}, "--nnodes = 0: N or MIN:MAX"},
      {{"--nnodes=2:"}, "--nnodes = 2:"},
      {{"--nnodes=4:2"}, "MIN must not exceed MAX"},
      {{"--nproc-per-node=0"}, "--nproc-per-node = 0"},
      {{"--max-restarts=-1"}, "--max-restarts = -1: a number, at least 0"},
      {{"--standalone=1"}, "--standalone takes no value"},
      {{"--standalone", "--nnodes=2"}, "--standalone: one node"},
      {{"--rdzv-backend=etcd"}, "--rdzv-backend = etcd: c10d or static"},
      {{"--nnodes=2", "--rdzv-backend=c10d"}, "--rdzv-endpoint is missing"},
      {{"--nnodes=2", "--rdzv-endpoint=h:0"}, "give one that is free"},
      {{"--nnodes=2", "--rdzv-endpoint=h:99999"}, "the port must be a number"},
      {{"--master-port=65536"}, "--master-port = 65536: a port, 1 to 65535"},
      {{"--nnodes=2", "--master-port=95526"}, "--master-port = 95526"},
      {{"--nnodes=2", "--rdzv-endpoint=[::1"}, "the bracket is not closed"},
      {{"--nnodes=2", "--rdzv-endpoint=:5"}, "there is no host"},
      {{"--nnodes=1:2"}, "a static rendezvous cannot grow"},
      {{"--nnodes=2", "--node-rank=2"}, "--node-rank = 2: less than --nnodes = 2"},
      {{"--rdzv-conf=join_timout=3"}, "the nearest is join_timeout"},
      {{"--rdzv-conf=join_timeout"}, "KEY=VALUE"},
      {{"--rdzv-conf=join_timeout=-1"}, "--rdzv-conf join_timeout = -1: a number, at least 0"},
      {{"--rdzv-id=../../tmp/x", "--log-dir=d"}, "--rdzv-id = ../../tmp/x: with --log-dir it names a folder there"},
      {{"--rdzv-id=..", "--log-dir=d"}, "--rdzv-id = ..: with"},
      {{"--rdzv-id=", "--log-dir=d"}, "it must be a plain file name"},
      {{"--tee=4", "--log-dir=d"}, "--tee = 4: 0 none"},
      {{"--tee=0:x", "--log-dir=d"}, "--tee = 0:x"},
      {{"--tee=3"}, "say where with --log-dir"},
      {{"--local-ranks-filter=a"}, "--local-ranks-filter = a"},
      {{"-m", "--no-python"}, "contradict each other"},
      {{"--numa-binding=node"}, "torchrun has this flag, tessera run does not"},
      {{"--start-method=thread"}, "--start-method = thread"},
      {{"--inject=do=explode"}, "--inject"},
      {{"--nproc-per-node=2", "--inject=rank=9,do=kill"}, "--inject"},
      {{"--nproc-per-node=2", "--local-ranks-filter=0,7"}, "--local-ranks-filter = 7: this node has 2 ranks"},
  };
  for (const auto& [arguments, text] : cases) EXPECT_THAT(refusal(arguments), HasSubstr(text)) << arguments.front();
  EXPECT_THROW(parse_run({"--nnodes=1"}, [](const std::string&) { return std::nullopt; }, devices), ConfigError);
}

TEST(RunOptions, KeepLogsInAFolderOfTheJobsName) {
  EXPECT_EQ(parse({"--rdzv-id=job.7", "--log-dir=d"}).job.output.folder, "d/job.7");
  EXPECT_EQ(parse({"--rdzv-id=team/job"}).job.run_id, "team/job") << "no folder is named by it";
}

TEST(RunOptions, DescribeEveryFlag) {
  for (const char* flag : {"--nnodes", "--nproc-per-node", "--rdzv-endpoint", "-t, --tee", "--inject"}) EXPECT_THAT(describe_run(), HasSubstr(flag));
}

}  // namespace
}  // namespace tessera::launch
