#include <thread>

#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>
#include <unistd.h>

#include "tessera/comm/meeting/stores.h"
#include "tessera/comm/testing.h"
#include "tessera/core/error.h"

extern char** environ;

namespace tessera::comm {
namespace {

using Clock = std::chrono::steady_clock;

constexpr const char* kCopy = "TESSERA_RANK_PROCESS";

// A copy of this program; its output goes to a file without a name.
class Process {
 public:
  Process(int rank, const std::vector<std::string>& arguments, const std::vector<std::string>& environment) : rank_(rank), output_(std::tmpfile()) {
    if (!output_) throw std::runtime_error("cannot make a temporary file");
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_adddup2(&actions, fileno(output_), STDOUT_FILENO);
    posix_spawn_file_actions_adddup2(&actions, fileno(output_), STDERR_FILENO);
    const auto pointers = [](const std::vector<std::string>& texts) {
      std::vector<char*> result;
      for (const auto& text : texts) result.push_back(const_cast<char*>(text.c_str()));
      result.push_back(nullptr);
      return result;
    };
    const int error = posix_spawn(&pid_, "/proc/self/exe", &actions, nullptr, pointers(arguments).data(), pointers(environment).data());
    posix_spawn_file_actions_destroy(&actions);
    if (error != 0) {
      std::fclose(output_);
      throw std::runtime_error(std::string("cannot start a copy of this program: ") + std::strerror(error));
    }
  }

  ~Process() {
    if (running()) {
      ::kill(pid_, SIGKILL);
      ::waitpid(pid_, nullptr, 0);
    }
    std::fclose(output_);
  }

  Process(const Process&) = delete;
  Process& operator=(const Process&) = delete;

  int rank() const { return rank_; }
  bool failed() const { return status_ && *status_ != 0; }

  bool running() {
    int status = 0;
    if (!status_ && ::waitpid(pid_, &status, WNOHANG) == pid_) status_ = status;
    return !status_;
  }

  std::string output() const {
    std::string text;
    std::array<char, 4096> buffer;
    std::rewind(output_);
    while (const size_t count = std::fread(buffer.data(), 1, buffer.size(), output_)) text.append(buffer.data(), count);
    return text;
  }

 private:
  int rank_;
  std::FILE* output_;
  pid_t pid_ = -1;
  std::optional<int> status_;
};

// This process's variables without GoogleTest's (a copy must not write the report of the suite) and without a launcher's.
std::vector<std::string> inherited_environment() {
  std::vector<std::string> result;
  for (char** variable = environ; *variable; ++variable) {
    const std::string_view text(*variable);
    const bool dropped = text.starts_with("GTEST_") || text.starts_with("TORCHELASTIC_") || text.starts_with("RANK=") || text.starts_with("LOCAL_") ||
                         text.starts_with("WORLD_SIZE=") || text.starts_with("OMP_NUM_THREADS=") || text.starts_with("MASTER_");
    if (!dropped) result.emplace_back(text);
  }
  return result;
}

// Starts a copy of this program for each rank, and waits until all have ended.
void run_program(int n, const std::string& test, int seconds, int port) {
  std::vector<std::unique_ptr<Process>> processes;
  for (int rank = 0; rank < n; ++rank) {
    auto environment = inherited_environment();
    for (const auto& variable : {std::string(kCopy) + "=1", detail::concat("RANK=", rank), detail::concat("LOCAL_RANK=", rank),
                                 detail::concat("WORLD_SIZE=", n), detail::concat("LOCAL_WORLD_SIZE=", n), std::string("MASTER_ADDR=127.0.0.1"),
                                 detail::concat("MASTER_PORT=", port), std::string("TORCHELASTIC_USE_AGENT_STORE=True"), std::string("OMP_NUM_THREADS=1")}) {
      environment.push_back(variable);
    }
    processes.push_back(std::make_unique<Process>(rank, std::vector<std::string>{"rank", "--gtest_filter=" + test}, environment));
  }

  const auto deadline = Clock::now() + std::chrono::seconds(seconds);
  for (bool running = true; running;) {
    running = false;
    for (const auto& process : processes) {
      running |= process->running();
      if (process->failed()) throw std::runtime_error(detail::concat("rank ", process->rank(), " failed:\n", process->output()));
    }
    if (running && Clock::now() > deadline) throw std::runtime_error(detail::concat("ranks as processes still run after ", seconds, " s"));
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
}

}  // namespace

void run_rank_processes(int n, const std::string& test, const std::function<void(World&)>& body, int seconds, const std::string& backend, int programs) {
  if (std::getenv(kCopy)) {
    auto world = World::from_environment({.backend = backend, .timeout = std::chrono::seconds(seconds)});
    world.guard([&] { body(world); });
    return;
  }
  // The store is served here, as an agent does it: no port to guess, and no rank that must outlive the others.
  const auto store = serve_store({"127.0.0.1", 0});
  for (int program = 0; program < programs; ++program) run_program(n, test, seconds, store->getPort());
}

}  // namespace tessera::comm
