#include "tessera/launch/local.h"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <optional>
#include <thread>

#include <arpa/inet.h>
#include <c10/util/intrusive_ptr.h>
#include <netinet/in.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>
#include <unistd.h>

#include "tessera/core/error.h"
#include "tessera/launch/verdict.h"
#include "tessera/launch/worker.h"

namespace tessera::launch {
namespace {

using Clock = std::chrono::steady_clock;

constexpr auto poll_interval = std::chrono::milliseconds(100);
/// After the first failure, so that the rank that caused it is seen too where another one noticed sooner.
constexpr auto settle_time = std::chrono::milliseconds(300);

/// Blocks what we wait for, in this thread and in those that it starts; restores the mask at the end.
class BlockedSignals {
 public:
  BlockedSignals() {
    sigemptyset(&signals_);
    for (const int signal : {SIGINT, SIGTERM, SIGCHLD}) sigaddset(&signals_, signal);
    struct sigaction hangup{};
    if (sigaction(SIGHUP, nullptr, &hangup) == 0 && hangup.sa_handler != SIG_IGN) sigaddset(&signals_, SIGHUP);  // nohup means what it says
    pthread_sigmask(SIG_BLOCK, &signals_, &before_);
  }
  ~BlockedSignals() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  BlockedSignals(const BlockedSignals&) = delete;
  BlockedSignals& operator=(const BlockedSignals&) = delete;

  /// The next signal within `patience`; nothing if none came.
  std::optional<int> wait(std::chrono::milliseconds patience) const {
    const timespec timeout{patience.count() / 1000, patience.count() % 1000 * 1'000'000};
    const int signal = sigtimedwait(&signals_, nullptr, &timeout);
    return signal > 0 ? std::optional(signal) : std::nullopt;
  }

 private:
  sigset_t signals_, before_;
};

/// A store for rendezvous on a free port of the loopback interface, that outlives every worker.
c10::intrusive_ptr<c10d::TCPStore> serve_store() {
  const int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address{.sin_family = AF_INET, .sin_port = 0, .sin_addr = {htonl(INADDR_LOOPBACK)}, .sin_zero = {}};
  socklen_t size = sizeof address;
  const bool listening = listener >= 0 && bind(listener, reinterpret_cast<sockaddr*>(&address), size) == 0 && listen(listener, SOMAXCONN) == 0 &&
                         getsockname(listener, reinterpret_cast<sockaddr*>(&address), &size) == 0;
  if (!listening) throw CommError(detail::concat("cannot serve a store on 127.0.0.1: ", std::strerror(errno)));
  c10d::TCPStoreOptions options;
  options.port = ntohs(address.sin_port);
  options.isServer = true;
  options.waitWorkers = false;
  options.masterListenFd = listener;
  return c10::make_intrusive<c10d::TCPStore>("127.0.0.1", options);
}

/// The ranks of one launch: started, asked to end, ended.
class Workers {
 public:
  Workers() = default;

  /// Where one cannot be started, the destructor ends those that were.
  void start(const LocalOptions& options, int port) {
    Variables variables = inherited_variables();
    const int cores = static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
    variables.emplace("OMP_NUM_THREADS", std::to_string(std::max(1, cores / options.nproc)));
    for (const auto& [name, value] : options.environment) variables[name] = value;
    variables["WORLD_SIZE"] = variables["LOCAL_WORLD_SIZE"] = std::to_string(options.nproc);
    variables["MASTER_ADDR"] = "127.0.0.1";
    variables["MASTER_PORT"] = std::to_string(port);
    variables["TORCHELASTIC_USE_AGENT_STORE"] = "True";
    variables["TORCHELASTIC_RESTART_COUNT"] = "0";
    for (int rank = 0; rank < options.nproc; ++rank) {
      Worker& worker = workers_.emplace_back();
      variables["RANK"] = variables["LOCAL_RANK"] = std::to_string(rank);
      variables["TESSERA_ERROR_FILE"] = worker.report.path();
      worker.pid = start_worker(options.command, variables);
    }
  }

  ~Workers() {
    send(SIGKILL);
    for (const Worker& worker : workers_) {
      if (worker.pid > 0) waitpid(worker.pid, nullptr, 0);
    }
  }
  Workers(const Workers&) = delete;
  Workers& operator=(const Workers&) = delete;

  bool running() const {
    return std::ranges::any_of(workers_, [](const Worker& worker) { return worker.pid > 0; });
  }

  /// To every worker that runs, and what it started: each is a process group.
  void send(int signal) const {
    for (const Worker& worker : workers_) {
      if (worker.pid > 0) kill(-worker.pid, signal);
    }
  }

  /// Those that have ended since the last call.
  std::vector<Ending> reap() {
    std::vector<Ending> endings;
    for (size_t rank = 0; rank < workers_.size(); ++rank) {
      Worker& worker = workers_[rank];
      siginfo_t ended{};
      if (worker.pid <= 0 || waitid(P_PID, worker.pid, &ended, WEXITED | WNOHANG | WNOWAIT) != 0 || ended.si_pid == 0) continue;
      const bool succeeded = ended.si_code == CLD_EXITED && ended.si_status == 0;
      if (!succeeded) kill(-worker.pid, SIGKILL);  // what it left behind in its group, whose number is ours until it is waited for
      int status = 0;
      waitpid(worker.pid, &status, 0);
      worker.pid = 0;
      endings.push_back({static_cast<int>(rank), status, worker.report.contents()});
    }
    return endings;
  }

 private:
  struct Worker {
    pid_t pid = 0;
    MemoryFile report{"tessera_error"};
  };
  std::vector<Worker> workers_;
};

/// Waits for all workers, and sees to it that they all end once one failed or a signal came.
class Watch {
 public:
  Watch(Workers& workers, const BlockedSignals& signals, std::chrono::duration<double> grace)
      : workers_(workers), signals_(signals), grace_(std::chrono::duration_cast<Clock::duration>(grace)) {}

  Verdict run() {
    while (workers_.running()) {
      const std::optional<int> signal = signals_.wait(poll_interval);
      if (signal && *signal != SIGCHLD && !interrupted_by_) interrupt(*signal);
      reap();
      const Clock::time_point now = Clock::now();
      if (ask_at_ && now >= *ask_at_) end_all(SIGTERM);
      if (kill_at_ && now >= *kill_at_) workers_.send(SIGKILL);
    }
    return interrupted_by_ ? interrupted() : judge(endings_);
  }

 private:
  void interrupt(int signal) {
    interrupted_by_ = signal;
    if (!kill_at_) end_all(signal);
  }

  void end_all(int signal) {
    workers_.send(signal);
    ask_at_.reset();
    kill_at_ = Clock::now() + grace_;
  }

  /// Ends that we caused ourselves explain nothing.
  void reap() {
    for (Ending& ending : workers_.reap()) {
      all_succeeded_ = all_succeeded_ && !ending.failed();
      if (kill_at_) continue;
      if (ending.failed() && !ask_at_) ask_at_ = Clock::now() + settle_time;
      endings_.push_back(std::move(ending));
    }
  }

  Verdict interrupted() const {
    if (const Verdict verdict = judge(endings_); verdict.exit_code != 0) return verdict;  // something had failed before
    if (all_succeeded_) return {};
    return {1, detail::concat("interrupted by ", describe_signal(*interrupted_by_), "; all ranks have ended")};
  }

  Workers& workers_;
  const BlockedSignals& signals_;
  Clock::duration grace_;
  std::vector<Ending> endings_;
  bool all_succeeded_ = true;
  std::optional<int> interrupted_by_;
  std::optional<Clock::time_point> ask_at_;   ///< when ranks that still run are asked to end, after another's failure
  std::optional<Clock::time_point> kill_at_;  ///< when they are made to; set once they were asked
};

}  // namespace

std::vector<std::string> self_command() {
  std::ifstream file("/proc/self/cmdline", std::ios::binary);
  std::vector<std::string> command;
  for (std::string argument; std::getline(file, argument, '\0');) command.push_back(argument);
  char path[4096];
  const ssize_t size = readlink("/proc/self/exe", path, sizeof path);
  invariant(size > 0 && !command.empty(), "cannot read /proc/self: ", std::strerror(errno));
  command.front().assign(path, size);
  return command;
}

int run_local(const LocalOptions& options) {
  require(options.nproc >= 1, "nproc = ", options.nproc, ": at least one process; --nproc 2 starts two");
  require(!options.command.empty(), "no program to start: name one after --");
  const BlockedSignals signals;  // before the store starts threads, which must not take them
  Verdict verdict;
  {
    const auto store = serve_store();
    Workers workers;
    workers.start(options, store->getPort());
    verdict = Watch(workers, signals, std::chrono::duration<double>(options.grace_s)).run();
  }
  std::fflush(stdout);
  if (!verdict.sentence.empty()) std::fprintf(stderr, "%s\n", verdict.sentence.c_str());
  return verdict.exit_code;
}

bool report_failure(Failure kind, std::string_view reason) {
  const char* path = std::getenv("TESSERA_ERROR_FILE");
  if (path == nullptr) return false;
  std::ofstream file(path, std::ios::trunc);
  file << write_report({kind, std::string(reason)}) << std::flush;
  return file.good();
}

void install_parent_watch() {
  const pid_t parent = getppid();
  invariant(prctl(PR_SET_PDEATHSIG, SIGKILL) == 0, "prctl: ", std::strerror(errno));
  if (getppid() != parent) std::_Exit(1);  // it ended meanwhile
}

}  // namespace tessera::launch
