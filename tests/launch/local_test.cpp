#include "tessera/launch/local.h"

#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <sstream>
#include <thread>

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tessera/comm/collectives.h"
#include "tessera/comm/flight_record/flight_record.h"
#include "tessera/comm/world.h"
#include "tessera/core/error.h"
#include "tessera/core/parallel.h"
#include "tessera/launch/worker.h"

namespace tessera::launch {
namespace {

using namespace std::chrono_literals;
using ::testing::HasSubstr;

constexpr char separator = '\n';

std::string read_file(const std::filesystem::path& path) {
  std::ifstream file(path);
  std::stringstream text;
  text << file.rdbuf();
  return text.str();
}

std::vector<std::string> lines_of(const std::string& text) {
  std::vector<std::string> lines;
  std::istringstream stream(text);
  for (std::string line; std::getline(stream, line);) lines.push_back(line);
  return lines;
}

/// Not a test: what the copies of this program are when `launch` below starts them as launchers.
TEST(Launcher, Process) {
  const char* command = std::getenv("LAUNCH_COMMAND");
  if (command == nullptr) GTEST_SKIP() << "runs as a child of the other tests";
  LocalOptions options{.nproc = std::atoi(std::getenv("LAUNCH_NPROC")), .command = {}, .environment = {{"FROM_OPTIONS", "yes"}}, .grace_s = 1};
  if (const char* grace = std::getenv("LAUNCH_GRACE")) options.grace_s = std::atof(grace);
  if (std::getenv("LAUNCH_POOL") != nullptr) {  // threads that block nothing, as whoever prepares the text leaves them
    at::set_num_threads(3);
    std::atomic<int> parts = 0;
    parallel_for(0, 3, 1, [&](int64_t, int64_t) { ++parts; });
    invariant(parts == 3, "no pool");
  }
  std::istringstream arguments(command);
  for (std::string argument; std::getline(arguments, argument, separator);) options.command.push_back(argument);
  std::_Exit(run_local(options));
}

/// Not a test either: a worker that joins its peers.
TEST(Worker, Process) {
  const char* mode = std::getenv("WORKER_MODE");
  if (mode == nullptr) GTEST_SKIP() << "runs as a child of the other tests";
  try {
    comm::WorldOptions options;
    options.timeout = 30s;
    auto world = comm::World::from_environment(options);
    const at::Tensor sum = at::full({3}, world.rank() + 1.0f);
    comm::all_reduce(world.group(), sum);
    if (mode == std::string("die") && world.rank() == 1) {
      std::signal(SIGSEGV, SIG_DFL);  // a sanitizer's handler would end the process by exit
      raise(SIGSEGV);
    }
    comm::all_reduce(world.group(), sum);
    std::printf("rank %d of %d: %g\n", world.rank(), world.size(), sum[0].item<float>());
    std::fflush(stdout);
  } catch (const CommError& error) {
    report_failure(Failure::Comm, error.what());
    std::_Exit(1);
  }
  std::_Exit(0);
}

class Local : public ::testing::Test {
 protected:
  Local() : folder_(std::filesystem::temp_directory_path() / ("tessera_launch_" + std::to_string(getpid()))) { std::filesystem::create_directories(folder_); }
  ~Local() override { std::filesystem::remove_all(folder_); }

  struct Outcome {
    int exit_code;
    std::string out, err;
    double seconds;
    std::string last_line() const { return lines_of(err).empty() ? "" : lines_of(err).back(); }
  };

  /// Runs a launcher in a process of its own, with its own signals and standard error; `meanwhile` gets its id. An empty variable in `extra` is taken away.
  Outcome launch(int nproc, const std::vector<std::string>& command, const std::function<void(pid_t)>& meanwhile = {}, const Variables& extra = {}) {
    Variables variables = inherited_variables();
    for (const char* name : {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}) variables.erase(name);
    for (const auto& [name, value] : extra) variables[name] = value;
    std::erase_if(variables, [](const auto& variable) { return variable.second.empty(); });
    std::string joined;
    for (const std::string& argument : command) joined += argument + separator;
    variables["LAUNCH_COMMAND"] = joined;
    variables["LAUNCH_NPROC"] = std::to_string(nproc);
    std::vector<std::string> assignments;
    std::vector<char*> environment;
    for (const auto& [name, value] : variables) assignments.push_back(name + "=" + value);
    for (std::string& assignment : assignments) environment.push_back(assignment.data());
    environment.push_back(nullptr);

    const auto start = std::chrono::steady_clock::now();
    const pid_t pid = fork();
    if (pid == 0) {
      dup2(open((folder_ / "out").c_str(), O_CREAT | O_TRUNC | O_WRONLY, 0600), STDOUT_FILENO);
      dup2(open((folder_ / "err").c_str(), O_CREAT | O_TRUNC | O_WRONLY, 0600), STDERR_FILENO);
      execle("/proc/self/exe", "launcher", "--gtest_filter=Launcher.Process", nullptr, environment.data());
      _exit(127);
    }
    if (meanwhile) meanwhile(pid);
    int status = 0;
    waitpid(pid, &status, 0);
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    return {WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status), read_file(folder_ / "out"), read_file(folder_ / "err"), seconds};
  }

  Outcome launch_shell(int nproc, const std::string& script, const std::function<void(pid_t)>& meanwhile = {}) {
    return launch(nproc, {"sh", "-c", script}, meanwhile);
  }

  Outcome launch_workers(int nproc, const std::string& mode) {
    return launch(nproc, {std::filesystem::read_symlink("/proc/self/exe"), "--gtest_filter=Worker.Process"}, {}, {{"WORKER_MODE", mode}});
  }

  /// Waits until `count` workers have left their process ids in the folder; the script's part is `echo $$ > FOLDER/pid.$RANK`.
  std::vector<pid_t> pids(int count) const {
    std::vector<pid_t> found;
    for (int rank = 0; rank < count; ++rank) {
      const auto path = folder_ / ("pid." + std::to_string(rank));
      for (int i = 0; i < 500 && read_file(path).empty(); ++i) std::this_thread::sleep_for(10ms);
      found.push_back(std::atoi(read_file(path).c_str()));
    }
    return found;
  }
  std::string note_pid() const { return "echo $$ > " + (folder_ / "pid.$RANK").string() + "; "; }

  std::filesystem::path folder_;
};

/// Gone, or a zombie that nobody waits for.
bool ended(pid_t pid) {
  for (int i = 0; i < 300; ++i) {
    const std::string stat = read_file("/proc/" + std::to_string(pid) + "/stat");
    if (stat.empty() || stat.substr(stat.rfind(')') + 2, 1) == "Z") return true;
    std::this_thread::sleep_for(10ms);
  }
  return false;
}

TEST_F(Local, GivesEachRankItsVariables) {
  const Outcome outcome = launch_shell(3, "echo \"$RANK/$WORLD_SIZE $LOCAL_RANK/$LOCAL_WORLD_SIZE $MASTER_ADDR $TORCHELASTIC_USE_AGENT_STORE $FROM_OPTIONS\"");
  EXPECT_EQ(outcome.exit_code, 0);
  EXPECT_EQ(outcome.err, "");
  for (const char* rank : {"0", "1", "2"}) EXPECT_THAT(outcome.out, HasSubstr(std::string(rank) + "/3 " + rank + "/3 127.0.0.1 True yes\n"));
}

TEST_F(Local, DealsCoresUnlessTold) {
  const std::vector<std::string> print{"sh", "-c", "echo threads $OMP_NUM_THREADS"};
  EXPECT_THAT(launch(1, print, {}, {{"OMP_NUM_THREADS", "7"}}).out, HasSubstr("threads 7\n"));
  const unsigned cores = std::thread::hardware_concurrency();
  EXPECT_THAT(launch(1, print, {}, {{"OMP_NUM_THREADS", ""}}).out, HasSubstr("threads " + std::to_string(cores) + "\n"));
  EXPECT_THAT(launch(3, print, {}, {{"OMP_NUM_THREADS", ""}}).out, HasSubstr("threads " + std::to_string(std::max(1u, cores / 3)) + "\n"));
}

TEST_F(Local, RanksMeet) {
  const Outcome outcome = launch_workers(2, "sum");
  EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
  EXPECT_THAT(outcome.out, HasSubstr("rank 0 of 2: 6\n"));
  EXPECT_THAT(outcome.out, HasSubstr("rank 1 of 2: 6\n"));
}

TEST_F(Local, ARankThatCrashesIsNamedAmongThoseThatLostIt) {
  const Outcome outcome = launch_workers(3, "die");
  EXPECT_EQ(outcome.exit_code, 1);
  EXPECT_EQ(outcome.last_line(), "rank 1 was ended by SIGSEGV (segmentation fault)") << outcome.err;
  EXPECT_LT(outcome.seconds, 10);
}

TEST_F(Local, ARankThatFailsEndsTheOthers) {
  const Outcome outcome = launch_shell(3, note_pid() + "[ $RANK = 1 ] && exit 7; sleep 100");
  EXPECT_EQ(outcome.exit_code, 1);
  EXPECT_EQ(outcome.last_line(), "rank 1 failed with exit code 7");
  EXPECT_LT(outcome.seconds, 5);
  for (const pid_t pid : pids(3)) EXPECT_TRUE(ended(pid));
}

TEST_F(Local, WhatARankThatFailedLeftBehindIsEnded) {
  const Outcome outcome = launch_shell(1, "sleep 100 & echo $! > " + (folder_ / "pid.0").string() + "; exit 7");
  EXPECT_EQ(outcome.exit_code, 1);
  EXPECT_LT(outcome.seconds, 5);
  EXPECT_TRUE(ended(pids(1).front()));
}

TEST_F(Local, ARankThatIgnoresTheRequestIsKilled) {
  const Outcome outcome = launch_shell(2, note_pid() + "if [ $RANK = 1 ]; then sleep 0.2; kill -9 $$; fi; trap '' TERM; while true; do sleep 0.1; done");
  EXPECT_EQ(outcome.exit_code, 1);
  EXPECT_EQ(outcome.last_line(), "rank 1 was ended by SIGKILL (killed)");
  EXPECT_LT(outcome.seconds, 10);
  for (const pid_t pid : pids(2)) EXPECT_TRUE(ended(pid));
}

TEST_F(Local, ARefusalIsTheLastLineOnce) {
  const Outcome outcome = launch_shell(3, "echo 'config optim.lr = x: expected a number' > $TESSERA_ERROR_FILE; exit 2");
  EXPECT_EQ(outcome.exit_code, 2);
  EXPECT_EQ(outcome.err, "optim.lr = x: expected a number\n");
}

TEST_F(Local, ARankThatFailsBeforeItRecordsIsNotExplainedByAnEarlierRun) {
  const auto records = folder_ / "record";
  const auto leave_records = [&](int ranks) {
    for (int rank = ranks - 1; rank >= 0; --rank) {
      comm::FlightRecord record(records, {.rank = rank, .size = ranks, .local_rank = rank, .local_size = ranks}, 8);
      const auto group = record.add_group({.name = "world", .rank = rank, .size = ranks});
      if (rank != 1) record.enter(*group, {.op = comm::Operation::AllReduce});
    }
  };
  const auto fails = [&] { return launch(2, {"sh", "-c", "echo 'other disk is full' > $TESSERA_ERROR_FILE; exit 1"}, {}, {{"TESSERA_RECORD_DIR", records}}); };
  for (const int ranks : {2, 4}) {
    leave_records(ranks);
    ASSERT_TRUE(std::filesystem::exists(comm::FlightRecord::file_of(records, ranks - 1)));
    const Outcome outcome = fails();
    EXPECT_EQ(outcome.exit_code, 1);
    EXPECT_THAT(outcome.err, ::testing::Not(HasSubstr("last entered"))) << "of a run of " << ranks;
    EXPECT_THAT(outcome.last_line(), HasSubstr("disk is full"));
    EXPECT_TRUE(std::filesystem::is_empty(records));
  }
}

TEST_F(Local, AReasonIsQuoted) {
  EXPECT_EQ(launch_shell(2, "[ $RANK = 0 ] || exit 0; echo 'other loss is nan' > $TESSERA_ERROR_FILE; exit 1").last_line(),
            "rank 0 failed with exit code 1: loss is nan");
}

TEST_F(Local, InterruptsAreHandedOnOnce) {
  for (const auto& [signal, name] : {std::pair(SIGINT, "SIGINT (interrupt)"), std::pair(SIGTERM, "SIGTERM (terminated)")}) {
    std::filesystem::remove(folder_ / "pid.0");
    std::filesystem::remove(folder_ / "pid.1");
    const std::string count = "n=0; trap 'n=$((n+1)); echo got $RANK $n' INT TERM; " + note_pid() + "while [ $n = 0 ]; do sleep 0.05; done; sleep 0.3; exit 1";
    const Outcome outcome = launch_shell(2, count, [&](pid_t launcher) {
      pids(2);
      kill(launcher, signal);
    });
    EXPECT_EQ(outcome.exit_code, 1);
    // The shells may say that their sleep ended; the launcher says its line once, last.
    EXPECT_EQ(outcome.last_line(), std::string("interrupted by ") + name + "; all ranks have ended");
    EXPECT_EQ(outcome.err.find("interrupted"), outcome.err.rfind("interrupted"));
    for (const char* line : {"got 0 1\n", "got 1 1\n"}) EXPECT_THAT(outcome.out, HasSubstr(line));
    EXPECT_THAT(outcome.out, ::testing::Not(HasSubstr(" 2\n")));
  }
}

TEST_F(Local, WhoAsksAgainDoesNotWaitForTheGraceTime) {
  const auto meanwhile = [&](pid_t launcher) {
    const auto workers = pids(2);
    kill(launcher, SIGTERM);
    std::this_thread::sleep_for(100ms);
    kill(launcher, SIGTERM);  // the same request
    std::this_thread::sleep_for(1100ms);
    kill(launcher, SIGINT);  // as schedulers go from one signal to the next
    std::this_thread::sleep_for(200ms);
    for (const pid_t pid : workers) EXPECT_EQ(kill(pid, 0), 0);
    kill(launcher, SIGTERM);
  };
  const Outcome outcome = launch(2, {"sh", "-c", "trap '' TERM INT; " + note_pid() + "while true; do sleep 0.05; done"}, meanwhile, {{"LAUNCH_GRACE", "60"}});
  EXPECT_LT(outcome.seconds, 30);
  EXPECT_EQ(outcome.exit_code, 1);
  EXPECT_EQ(outcome.last_line(), "interrupted by SIGTERM (terminated); all ranks have ended");
}

/// Threads of a process, its first aside, to which the kernel may give a signal.
std::vector<pid_t> threads_that_take(pid_t process, int signal) {
  std::vector<pid_t> found;
  for (const auto& task : std::filesystem::directory_iterator("/proc/" + std::to_string(process) + "/task")) {
    const pid_t thread = std::atoi(task.path().filename().c_str());
    for (const std::string& line : lines_of(read_file(task.path() / "status"))) {
      const bool takes = line.starts_with("SigBlk:") && (std::stoull(line.substr(7), nullptr, 16) >> (signal - 1) & 1) == 0;
      if (takes && thread != process) found.push_back(thread);
    }
  }
  return found;
}

TEST_F(Local, InterruptsAreHandedOnWhicheverThreadTakesThem) {
  const std::string obey = "trap 'echo got $RANK; exit 0' TERM; " + note_pid() + "while true; do sleep 0.05; done";
  const auto check = [&](const std::function<void(pid_t)>& interrupt) {
    for (const char* file : {"pid.0", "pid.1"}) std::filesystem::remove(folder_ / file);
    const auto meanwhile = [&](pid_t launcher) {
      pids(2);
      EXPECT_GE(threads_that_take(launcher, SIGTERM).size(), 2) << "the pool that this is about";
      interrupt(launcher);
    };
    const Outcome outcome = launch(2, {"sh", "-c", obey}, meanwhile, {{"LAUNCH_POOL", "yes"}});
    EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
    for (const char* line : {"got 0\n", "got 1\n"}) EXPECT_THAT(outcome.out, HasSubstr(line));
  };
  check([](pid_t launcher) { kill(launcher, SIGTERM); });
  check([](pid_t launcher) { syscall(SYS_tgkill, launcher, threads_that_take(launcher, SIGTERM).front(), SIGTERM); });
}

TEST_F(Local, RanksThatEndWellAfterAnInterruptAreASuccess) {
  const Outcome outcome = launch_shell(2, "trap 'exit 0' TERM; " + note_pid() + "while true; do sleep 0.05; done", [&](pid_t launcher) {
    pids(2);
    kill(launcher, SIGTERM);
  });
  EXPECT_EQ(outcome.exit_code, 0);
  EXPECT_THAT(outcome.err, ::testing::Not(HasSubstr("interrupted")));
}

TEST_F(Local, AKilledLauncherLeavesNoOrphan) {
  std::vector<pid_t> workers;
  launch_shell(2, note_pid() + "trap '' TERM INT HUP; while true; do sleep 0.1; done", [&](pid_t launcher) {
    workers = pids(2);
    kill(launcher, SIGKILL);
  });
  for (const pid_t pid : workers) EXPECT_TRUE(ended(pid));
}

TEST_F(Local, RefusesWhatItCannotStart) {
  EXPECT_THROW(run_local({.nproc = 0, .command = {"true"}}), ConfigError);
  EXPECT_THROW(run_local({.nproc = 1, .command = {}}), ConfigError);
  try {
    run_local({.nproc = 2, .command = {"no-such-program-of-ours"}});
    FAIL() << "started";
  } catch (const ConfigError& error) {
    EXPECT_STREQ(error.what(), "cannot start 'no-such-program-of-ours': No such file or directory; give a program that exists and may be executed");
  }
}

TEST_F(Local, RefusesTooFewOpenFilesByTheLimitsName) {
  rlimit before{};
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &before), 0);
  const auto told = [&](rlim_t files) -> std::string {
    const rlimit limit{files, before.rlim_max};
    setrlimit(RLIMIT_NOFILE, &limit);
    std::string said = "started";
    try {
      run_local({.nproc = 2, .command = {"true"}});
    } catch (const ConfigError& error) {
      said = error.what();
    }
    setrlimit(RLIMIT_NOFILE, &before);
    return said;
  };
  EXPECT_EQ(told(16),
            "ulimit -n = 16: a process may have no more files open than that, and 2 ranks need at least 30; raise it with `ulimit -n 1024`, or start "
            "fewer");
  EXPECT_EQ(told(64), "started");
}

TEST_F(Local, KnowsItsOwnCommand) {
  const std::vector<std::string> command = self_command();
  ASSERT_FALSE(command.empty());
  EXPECT_EQ(command.front(), std::filesystem::read_symlink("/proc/self/exe"));
}

TEST_F(Local, WithoutALauncherNobodyWaitsForTheReason) {
  unsetenv("TESSERA_ERROR_FILE");
  EXPECT_FALSE(report_failure(Failure::Other, "reason"));
  setenv("TESSERA_ERROR_FILE", (folder_ / "no" / "such").c_str(), 1);
  EXPECT_FALSE(report_failure(Failure::Other, "reason"));
  setenv("TESSERA_ERROR_FILE", (folder_ / "report").c_str(), 1);
  EXPECT_TRUE(report_failure(Failure::Config, "reason"));
  EXPECT_EQ(read_file(folder_ / "report"), "config reason\n");
  unsetenv("TESSERA_ERROR_FILE");
}

}  // namespace
}  // namespace tessera::launch
