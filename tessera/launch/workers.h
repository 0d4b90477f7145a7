#pragma once

#include <array>
#include <string>
#include <vector>

#include <sys/types.h>

#include "tessera/launch/job_end.h"
#include "tessera/launch/output.h"
#include "tessera/launch/worker.h"

/// The processes of one attempt on this machine. Not part of the public surface.
namespace tessera::launch {

struct WorkerPlan {
  int rank = 0;
  std::vector<std::string> command{};
  Variables variables{};  ///< all of its environment but the file for its report
  OutputPlan output{};
};

/// Started, sent signals to, waited for. The destructor ends those that still run, with SIGKILL.
class Workers {
 public:
  Workers() = default;
  ~Workers();
  Workers(const Workers&) = delete;
  Workers& operator=(const Workers&) = delete;

  /// Throws ConfigError where one cannot be started; the destructor ends those that were.
  void start(const std::vector<WorkerPlan>& plans);

  bool running() const;

  /// To every worker that runs, and what it started: each is a process group.
  void send(int signal);

  /// Those that have ended since the last call.
  std::vector<Ending> reap();

 private:
  struct Worker {
    int rank = 0;
    pid_t pid = 0;
    MemoryFile report{"tessera_error"};
  };
  Output output_;
  std::vector<Worker> workers_;
};

}  // namespace tessera::launch
