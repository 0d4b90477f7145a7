#include "tessera/launch/worker.h"

#include <cerrno>
#include <cstring>
#include <system_error>
#include <utility>

#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tessera/core/error.h"
#include "tessera/launch/signals.h"

// fork and exec by hand rather than posix_spawn, which has no place to ask the kernel for the parent-death signal. That signal is asked for after the parent
// may have ended already, so the parent is compared after it. An error of exec comes back by a pipe that a successful one closes: so a program that cannot be
// started is refused by name, and is not a worker that failed.

namespace tessera::launch {
namespace {

/// Null-terminated, as execve wants it; borrows from `strings`.
std::vector<char*> pointers(const std::vector<std::string>& strings) {
  std::vector<char*> result;
  for (const std::string& string : strings) result.push_back(const_cast<char*>(string.c_str()));
  result.push_back(nullptr);
  return result;
}

/// What the child does between fork and exec; only calls that are safe there, since other threads of the parent may hold locks. Returns what went wrong.
int become(char* const* command, char* const* environment, pid_t launcher, int null_input, std::array<int, 2> output) {
  setpgid(0, 0);
  if (prctl(PR_SET_PDEATHSIG, SIGKILL) != 0) return errno;
  if (getppid() != launcher) _exit(1);  // it ended before the kernel could promise anything
  CaughtSignals::restore_defaults();
  sigset_t none;
  sigemptyset(&none);
  sigprocmask(SIG_SETMASK, &none, nullptr);
  dup2(null_input, STDIN_FILENO);
  if (output[0] >= 0) dup2(output[0], STDOUT_FILENO);
  if (output[1] >= 0) dup2(output[1], STDERR_FILENO);
  execvpe(command[0], command, environment);
  return errno;
}

}  // namespace

Variables inherited_variables() {
  Variables variables;
  for (char** entry = environ; *entry != nullptr; ++entry) {
    const std::string text = *entry;
    const size_t equals = text.find('=');
    if (equals != std::string::npos) variables[text.substr(0, equals)] = text.substr(equals + 1);
  }
  return variables;
}

MemoryFile::MemoryFile(const char* name) : descriptor_(memfd_create(name, MFD_CLOEXEC)) { invariant(descriptor_ >= 0, "memfd_create: ", std::strerror(errno)); }

MemoryFile::~MemoryFile() {
  if (descriptor_ >= 0) close(descriptor_);
}

MemoryFile::MemoryFile(MemoryFile&& other) noexcept : descriptor_(std::exchange(other.descriptor_, -1)) {}

std::string MemoryFile::path() const { return detail::concat("/proc/", getpid(), "/fd/", descriptor_); }

std::string MemoryFile::contents() const {
  std::string text;
  std::array<char, 1 << 16> part;
  for (ssize_t size; (size = pread(descriptor_, part.data(), part.size(), static_cast<off_t>(text.size()))) > 0;) text.append(part.data(), size);
  return text;
}

pid_t start_worker(const std::vector<std::string>& command, const Variables& variables, std::array<int, 2> output) {
  std::vector<std::string> assignments;
  for (const auto& [name, value] : variables) assignments.push_back(name + "=" + value);
  const std::vector<char*> arguments = pointers(command), environment = pointers(assignments);

  // The child's end of the pipe closes with a successful exec; otherwise it brings the error.
  int report[2];
  invariant(pipe2(report, O_CLOEXEC) == 0, "pipe: ", std::strerror(errno));
  const int null_input = open("/dev/null", O_RDONLY | O_CLOEXEC);
  const pid_t launcher = getpid();
  const pid_t pid = fork();
  if (pid == 0) {
    const int error = become(arguments.data(), environment.data(), launcher, null_input, output);
    [[maybe_unused]] const ssize_t written = write(report[1], &error, sizeof error);
    _exit(127);
  }
  const int fork_error = errno;
  close(report[1]);
  close(null_input);
  int error = 0;
  const bool failed = pid > 0 && read(report[0], &error, sizeof error) == sizeof error;
  close(report[0]);
  if (pid < 0) throw std::system_error(fork_error, std::generic_category(), "a rank's process cannot be started");
  if (failed) {
    waitpid(pid, nullptr, 0);
    throw ConfigError(detail::concat("cannot start '", command.front(), "': ", std::strerror(error), "; give a program that exists and may be executed"));
  }
  return pid;
}

}  // namespace tessera::launch
