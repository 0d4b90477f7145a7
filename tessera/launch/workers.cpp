#include "tessera/launch/workers.h"

#include <algorithm>

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

// A worker's group is killed between seeing its end and reaping it (WNOWAIT): until it is reaped its number cannot be anybody else's. What a worker that ended
// with 0 leaves running is its own affair.

namespace tessera::launch {
namespace {

/// Our copies of a worker's ends of its streams, closed however its start went.
class Ends {
 public:
  explicit Ends(std::array<int, 2> descriptors) : descriptors_(descriptors) {}
  ~Ends() {
    for (const int descriptor : descriptors_) {
      if (descriptor >= 0) close(descriptor);
    }
  }
  Ends(const Ends&) = delete;
  Ends& operator=(const Ends&) = delete;
  const std::array<int, 2>& get() const { return descriptors_; }

 private:
  std::array<int, 2> descriptors_;
};

}  // namespace

Workers::~Workers() {
  send(SIGKILL);
  for (const Worker& worker : workers_) {
    if (worker.pid > 0) waitpid(worker.pid, nullptr, 0);
  }
}

void Workers::start(const std::vector<WorkerPlan>& plans) {
  for (const WorkerPlan& plan : plans) {
    Worker& worker = workers_.emplace_back();
    worker.rank = plan.rank;
    Variables variables = plan.variables;
    variables["TESSERA_ERROR_FILE"] = variables["TORCHELASTIC_ERROR_FILE"] = worker.report.path();
    const Ends ends(output_.open(plan.rank, plan.output));
    worker.pid = start_worker(plan.command, variables, ends.get());
  }
}

bool Workers::running() const {
  return std::ranges::any_of(workers_, [](const Worker& worker) { return worker.pid > 0; });
}

void Workers::send(int signal) {
  for (const Worker& worker : workers_) {
    if (worker.pid <= 0) continue;
    kill(-worker.pid, signal);
    output_.hurry();
  }
}

std::vector<Ending> Workers::reap() {
  std::vector<Ending> endings;
  for (Worker& worker : workers_) {
    siginfo_t ended{};
    if (worker.pid <= 0 || waitid(P_PID, worker.pid, &ended, WEXITED | WNOHANG | WNOWAIT) != 0 || ended.si_pid == 0) continue;
    const bool succeeded = ended.si_code == CLD_EXITED && ended.si_status == 0;
    if (!succeeded) kill(-worker.pid, SIGKILL);  // what it left behind in its group, whose number is ours until it is waited for
    int status = 0;
    waitpid(worker.pid, &status, 0);
    worker.pid = 0;
    endings.push_back({worker.rank, status, worker.report.contents(), succeeded ? "" : output_.last_lines(worker.rank)});
  }
  return endings;
}

}  // namespace tessera::launch
