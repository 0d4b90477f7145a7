#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tessera/comm/meeting/slurm.h"
#include "tessera/comm/world.h"
#include "tessera/core/error.h"

namespace tessera::comm {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using Table = std::map<std::string, std::string>;

Environment read(const Table& variables) {
  return read_environment([&](const std::string& name) -> std::optional<std::string> {
    const auto found = variables.find(name);
    return found == variables.end() ? std::nullopt : std::optional(found->second);
  });
}

std::string refusal(const std::function<void()>& body) {
  try {
    body();
  } catch (const ConfigError& error) {
    return error.what();
  }
  return "nothing was refused";
}

std::string refusal(const Table& variables) {
  return refusal([&] { read(variables); });
}

Table with(Table table, const Table& more) {
  for (const auto& [name, value] : more) {
    table.erase(name);
    if (value != "(unset)") table[name] = value;
  }
  return table;
}

struct ExpectedEnvironment {
  int rank, size, local_rank, local_size;
  std::string address;
  int port;
  Launcher launcher;
};

void expect(const Table& variables, const ExpectedEnvironment& expected) {
  const auto actual = read(variables);
  EXPECT_EQ(actual.rank, expected.rank);
  EXPECT_EQ(actual.size, expected.size);
  EXPECT_EQ(actual.local_rank, expected.local_rank);
  EXPECT_EQ(actual.local_size, expected.local_size);
  EXPECT_EQ(actual.master_addr, expected.address);
  EXPECT_EQ(actual.master_port, expected.port);
  EXPECT_EQ(actual.launcher, expected.launcher);
  EXPECT_EQ(actual.launched, expected.launcher != Launcher::None);
}

const ExpectedEnvironment kAlone{0, 1, 0, 1, "", 0, Launcher::None};
const Table kTorchrun{{"RANK", "5"},           {"LOCAL_RANK", "1"}, {"WORLD_SIZE", "8"}, {"LOCAL_WORLD_SIZE", "4"}, {"MASTER_ADDR", "10.0.0.1"},
                      {"MASTER_PORT", "29400"}};
const Table kMpirun{{"OMPI_COMM_WORLD_RANK", "3"}, {"OMPI_COMM_WORLD_SIZE", "4"}, {"OMPI_COMM_WORLD_LOCAL_RANK", "1"}, {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"}};
const Table kSrun{{"SLURM_JOB_ID", "901593"},
                  {"SLURM_STEP_ID", "2"},
                  {"SLURM_PROCID", "5"},
                  {"SLURM_NTASKS", "7"},
                  {"SLURM_LOCALID", "1"},
                  {"SLURM_NODEID", "2"},
                  {"SLURM_TASKS_PER_NODE", "2(x3),1"},
                  {"SLURM_JOB_NODELIST", "node[01-03,7]"}};
const int kPort = 20000 + (31 * 901593 + 2) % 12768;

TEST(Variables, OfAMasterWithBracketsAndPort) {
  expect(with(kTorchrun, {{"MASTER_ADDR", "[::1]"}}), {5, 8, 1, 4, "::1", 29400, Launcher::Torchrun});
  expect(with(kTorchrun, {{"MASTER_ADDR", "::1"}}), {5, 8, 1, 4, "::1", 29400, Launcher::Torchrun});
  expect(with(kTorchrun, {{"MASTER_ADDR", "[fe80::7]:31000"}, {"MASTER_PORT", "(unset)"}}), {5, 8, 1, 4, "fe80::7", 31000, Launcher::Torchrun});
  expect(with(kTorchrun, {{"MASTER_ADDR", "node7:29400"}}), {5, 8, 1, 4, "node7", 29400, Launcher::Torchrun});
  EXPECT_THAT(refusal(with(kTorchrun, {{"MASTER_ADDR", "[::1]:31000"}})),
              HasSubstr("MASTER_PORT = 29400 contradicts MASTER_ADDR = \"[::1]:31000\", which names port 31000"));
  EXPECT_THAT(refusal(with(kTorchrun, {{"MASTER_ADDR", "[::1"}})), HasSubstr("MASTER_ADDR = \"[::1\""));
}

TEST(Variables, OfOpenMpi) {
  expect(kMpirun, {3, 4, 1, 2, "", 0, Launcher::Mpirun});
  expect(with(kMpirun, {{"MASTER_ADDR", "10.0.0.9"}, {"MASTER_PORT", "1234"}}), {3, 4, 1, 2, "10.0.0.9", 1234, Launcher::Mpirun});
  expect(with(kMpirun, {{"MASTER_PORT", "1234"}}), {3, 4, 1, 2, "", 1234, Launcher::Mpirun});
  expect(with(kMpirun, {{"OMPI_COMM_WORLD_LOCAL_RANK", "(unset)"}, {"OMPI_COMM_WORLD_LOCAL_SIZE", "(unset)"}}), {3, 4, 3, 4, "", 0, Launcher::Mpirun});
  EXPECT_EQ(refusal(with(kMpirun, {{"OMPI_COMM_WORLD_RANK", "4"}})), "OMPI_COMM_WORLD_RANK = 4 must be between 0 and OMPI_COMM_WORLD_SIZE - 1 = 3");
  EXPECT_EQ(refusal(with(kMpirun, {{"OMPI_COMM_WORLD_LOCAL_RANK", "2"}})),
            "OMPI_COMM_WORLD_LOCAL_RANK = 2 must be between 0 and OMPI_COMM_WORLD_LOCAL_SIZE - 1 = 1");
  EXPECT_EQ(refusal(with(kMpirun, {{"OMPI_COMM_WORLD_SIZE", "(unset)"}})), "OMPI_COMM_WORLD_SIZE is not set while other variables of mpirun are");
  EXPECT_THAT(refusal(with(kMpirun, {{"MASTER_PORT", "0"}})), HasSubstr("MASTER_PORT = 0 must be a port"));
}

TEST(Variables, OfOtherMpis) {
  expect({{"PMI_RANK", "2"}, {"PMI_SIZE", "6"}, {"MPI_LOCALRANKID", "0"}, {"MPI_LOCALNRANKS", "2"}}, {2, 6, 0, 2, "", 0, Launcher::Mpirun});
  expect({{"PMI_RANK", "2"}, {"PMI_SIZE", "6"}}, {2, 6, 2, 6, "", 0, Launcher::Mpirun});
}

TEST(Variables, OfAStep) {
  expect(kSrun, {5, 7, 1, 2, "node01", kPort, Launcher::Srun});
  expect(with(kSrun, {{"SLURM_PROCID", "6"}, {"SLURM_LOCALID", "0"}, {"SLURM_NODEID", "3"}}), {6, 7, 0, 1, "node01", kPort, Launcher::Srun});
  expect(with(kSrun, {{"MASTER_ADDR", "10.1.1.1"}}), {5, 7, 1, 2, "10.1.1.1", kPort, Launcher::Srun});
  expect(with(kSrun, {{"MASTER_PORT", "4000"}}), {5, 7, 1, 2, "node01", 4000, Launcher::Srun});
  // The step's own variables win over the job's.
  expect(with(kSrun, {{"SLURM_STEP_NUM_TASKS", "6"}, {"SLURM_STEP_NODELIST", "gpu[2,4]"}, {"SLURM_STEP_TASKS_PER_NODE", "3(x2)"}, {"SLURM_NODEID", "1"}}),
         {5, 6, 1, 3, "gpu2", kPort, Launcher::Srun});
  // PMI of srun says the same.
  expect(with(kSrun, {{"PMI_RANK", "5"}, {"PMI_SIZE", "7"}}), {5, 7, 1, 2, "node01", kPort, Launcher::Srun});
  // Evenly, where the list of tasks is missing.
  expect(with(kSrun, {{"SLURM_TASKS_PER_NODE", "(unset)"}, {"SLURM_NTASKS", "8"}}), {5, 8, 1, 2, "node01", kPort, Launcher::Srun});
}

TEST(Variables, OfAStepOnOneNode) {
  const Table step{{"SLURM_PROCID", "1"}, {"SLURM_NTASKS", "3"}, {"SLURM_LOCALID", "1"}, {"SLURM_NODEID", "0"}, {"SLURM_STEP_NODELIST", "localhost"},
                   {"SLURM_JOB_ID", "7"}};
  expect(step, {1, 3, 1, 3, "127.0.0.1", 20217, Launcher::Srun});
  expect(with(step, {{"SLURM_STEP_NODELIST", "(unset)"}}), {1, 3, 1, 3, "127.0.0.1", 20217, Launcher::Srun});
  expect({{"SLURM_PROCID", "1"}, {"SLURM_NTASKS", "3"}}, {1, 3, 1, 3, "127.0.0.1", 20000, Launcher::Srun});
}

TEST(Variables, OfABatchScriptOrAnAllocationAreNone) {
  const Table batch{{"SLURM_JOB_ID", "7"},
                    {"SLURM_PROCID", "0"},
                    {"SLURM_NTASKS", "4"},
                    {"SLURM_LOCALID", "0"},
                    {"SLURM_NODEID", "0"},
                    {"SLURM_JOB_NODELIST", "n[1-2]"},
                    {"SLURM_TASKS_PER_NODE", "2(x2)"},
                    {"ENVIRONMENT", "BATCH"}};
  expect(batch, kAlone);
  // Slurm's own steps: the script's and the shell's of salloc.
  expect(with(batch, {{"SLURM_STEP_ID", "4294967291"}, {"SLURM_STEPID", "4294967291"}}), kAlone);
  expect(with(batch, {{"ENVIRONMENT", "(unset)"}, {"SLURM_STEP_ID", "4294967290"}, {"SLURM_STEP_NUM_TASKS", "4"}}), kAlone);
  expect(with(batch, {{"ENVIRONMENT", "(unset)"}, {"SLURM_PROCID", "(unset)"}}), kAlone);
  // srun inside of it is one.
  expect(with(batch, {{"SLURM_STEP_ID", "0"}, {"SLURM_PROCID", "3"}, {"SLURM_LOCALID", "1"}, {"SLURM_NODEID", "1"}}),
         {3, 4, 1, 2, "n1", 20217, Launcher::Srun});
  // A step of one task may as well be a shell.
  expect({{"SLURM_STEP_ID", "0"}, {"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "1"}}, kAlone);
}

TEST(Variables, OfAStepAreRefusedByName) {
  EXPECT_EQ(refusal(with(kSrun, {{"SLURM_PROCID", "7"}})), "SLURM_PROCID = 7 must be between 0 and SLURM_NTASKS - 1 = 6");
  EXPECT_EQ(refusal(with(kSrun, {{"SLURM_NTASKS", "many"}})), "SLURM_NTASKS = \"many\" is not a whole number; it must be between 1 and 16777216");
  EXPECT_EQ(refusal(with(kSrun, {{"SLURM_LOCALID", "2"}})), "SLURM_LOCALID = 2 must be between 0 and tasks of its node - 1 = 1");
  EXPECT_THAT(refusal(with(kSrun, {{"SLURM_LOCALID", "(unset)"}})), HasSubstr("SLURM_LOCALID = \"\" is not a whole number"));
  EXPECT_EQ(refusal(with(kSrun, {{"SLURM_NODEID", "4"}})), "SLURM_NODEID = 4 must be between 0 and nodes - 1 = 3");
  EXPECT_EQ(refusal(with(kSrun, {{"SLURM_TASKS_PER_NODE", "2(x4)"}})), "SLURM_TASKS_PER_NODE = \"2(x4)\" sums to 8 tasks while SLURM_NTASKS = 7");
  EXPECT_EQ(refusal(with(kSrun, {{"SLURM_TASKS_PER_NODE", "3,4"}})), "SLURM_TASKS_PER_NODE = \"3,4\" names 2 nodes while the list of nodes has 4");
  EXPECT_EQ(refusal(with(kSrun, {{"SLURM_TASKS_PER_NODE", "(unset)"}})),
            "SLURM_TASKS_PER_NODE is not set, and SLURM_NTASKS = 7 tasks do not spread evenly over 4 nodes");
  EXPECT_EQ(refusal(with(kSrun, {{"SLURM_JOB_NODELIST", "(unset)"}})),
            "SLURM_NODELIST is not set, so that the first node is not known; set MASTER_ADDR to an address of rank 0's node");
  EXPECT_THAT(refusal(with(kSrun, {{"SLURM_JOB_ID", "-3"}})), HasSubstr("SLURM_JOB_ID = -3 must be"));
}

TEST(Variables, TheInnermostLauncherWins) {
  auto all = kTorchrun;
  all.insert(kMpirun.begin(), kMpirun.end());
  all.insert(kSrun.begin(), kSrun.end());
  expect(all, {5, 8, 1, 4, "10.0.0.1", 29400, Launcher::Torchrun});
  auto mpirun_in_slurm = kMpirun;
  mpirun_in_slurm.insert(kSrun.begin(), kSrun.end());
  expect(mpirun_in_slurm, {3, 4, 1, 2, "", 0, Launcher::Mpirun});
  // A helper process of mpirun was started by srun: its numbers are not the program's.
  expect(with(kSrun, {{"PMI_RANK", "9"}, {"PMI_SIZE", "14"}}), {9, 14, 9, 14, "", 0, Launcher::Mpirun});
}

TEST(Variables, OfTorchThatAScriptExportsMustAgree) {
  expect(with(kMpirun, {{"WORLD_SIZE", "4"}, {"LOCAL_RANK", "1"}}), {3, 4, 1, 2, "", 0, Launcher::Mpirun});
  EXPECT_EQ(refusal(with(kMpirun, {{"WORLD_SIZE", "8"}})),
            "WORLD_SIZE = \"8\" contradicts mpirun, which says 4; unset it, or set RANK as well to be launched by torchrun's variables");
  EXPECT_THAT(refusal(with(kSrun, {{"LOCAL_RANK", "0"}})), HasSubstr("LOCAL_RANK = \"0\" contradicts srun, which says 1"));
  EXPECT_THAT(refusal(Table{{"PMI_RANK", "0"}}), HasSubstr("PMI_SIZE is not set while other variables of mpirun are"));
  EXPECT_THAT(refusal(Table{{"WORLD_SIZE", "8"}}), HasSubstr("RANK is not set while other variables of a launcher are"));
}

TEST(Slurm, ExpandsListsOfNodes) {
  const auto nodes = [](const std::string& list) { return expand_nodes(list, "LIST"); };
  EXPECT_THAT(nodes("localhost"), ElementsAre("localhost"));
  EXPECT_THAT(nodes("node[01-03,7],gpu2"), ElementsAre("node01", "node02", "node03", "node7", "gpu2"));
  EXPECT_THAT(nodes("n[9-11]"), ElementsAre("n9", "n10", "n11"));
  EXPECT_THAT(nodes("n[098-101]-ib"), ElementsAre("n098-ib", "n099-ib", "n100-ib", "n101-ib"));
  EXPECT_THAT(nodes("r[1-2]n[3,5]"), ElementsAre("r1n3", "r1n5", "r2n3", "r2n5"));
  EXPECT_THAT(nodes("a-b,c.d"), ElementsAre("a-b", "c.d"));
  for (const std::string bad : {"", "n[", "n[3-1]", "n[a]", "n1,,n2", "n]", "n[1-]", "n[1", "n)[1]"}) {
    EXPECT_THAT(refusal([&] { nodes(bad); }), HasSubstr("LIST = \"" + bad + "\" is not a list of nodes")) << bad;
  }
  // Lists that would grow without bound: of brackets, of their product, of ranges in one, of a name.
  std::string brackets = "n";
  for (int i = 0; i < 1000; ++i) brackets += "[1]";
  for (const std::string& bad : {brackets, std::string("r[1-10000]n[1-10000]"), std::string("n[1-200000,1-200000]"), std::string(256, 'n')}) {
    EXPECT_THAT(refusal([&] { nodes(bad); }), HasSubstr("is not a list of nodes")) << bad;
  }
  EXPECT_THAT(refusal([&] { nodes("n[1-200000],m[1-200000]"); }), HasSubstr("is of more than 262144 nodes"));
}

TEST(Slurm, ExpandsTasksPerNode) {
  const auto counts = [](const std::string& list) { return expand_counts(list, "LIST"); };
  EXPECT_THAT(counts("4"), ElementsAre(4));
  EXPECT_THAT(counts("2(x3),1"), ElementsAre(2, 2, 2, 1));
  EXPECT_THAT(counts("1,2(x1)"), ElementsAre(1, 2));
  for (const std::string bad : {"", "2(x3", "2(x0)", "0", "2,,1", "-1", "2 (x3)"}) {
    EXPECT_THAT(refusal([&] { counts(bad); }), HasSubstr("LIST = \"" + bad + "\" is not a list of tasks per node")) << bad;
  }
  EXPECT_THAT(refusal([&] { counts("1(x9999999)"); }), HasSubstr("is of more than 262144 nodes"));
}

}  // namespace
}  // namespace tessera::comm
