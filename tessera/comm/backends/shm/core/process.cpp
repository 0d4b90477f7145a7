#include "tessera/comm/backends/shm/core/process.h"

#include <fstream>
#include <sstream>
#include <string>
#include <utility>

#include <poll.h>
#include <sys/syscall.h>
#include <unistd.h>

// Numbers of processes come again, so a process is its number and the time when it started. A pidfd tells of the end of one that is not our child, without a
// race from then on; only between reading its number and opening it another could have come, and the time is compared once more.

namespace tessera::comm::shm {
namespace {

// Field 22 of /proc/PID/stat; the name in parentheses before it may hold anything. 0 where there is no such process, or a dead one.
uint64_t started(pid_t pid) {
  std::ifstream stat("/proc/" + std::to_string(pid) + "/stat");
  std::string text;
  if (!std::getline(stat, text)) return 0;
  std::istringstream fields(text.substr(text.rfind(')') + 1));
  std::string field;
  fields >> field;
  if (field == "Z" || field == "X") return 0;
  constexpr int kBefore = 18;  // fields 4 to 21
  for (int i = 0; i < kBefore; ++i) fields >> field;
  uint64_t time = 0;
  fields >> time;
  return time;
}

}  // namespace

ProcessId ProcessId::self() { return {::getpid(), started(::getpid())}; }

ProcessWatch::ProcessWatch(const ProcessId& process) : process_(process) {
#if defined(SYS_pidfd_open)
  descriptor_ = static_cast<int>(::syscall(SYS_pidfd_open, process.pid, 0));
  // Opened after it died, this could be a later process's.
  if (descriptor_ >= 0 && started(process.pid) != process.start_time) {
    ::close(descriptor_);
    descriptor_ = -1;
  }
#endif
}

ProcessWatch::ProcessWatch(ProcessWatch&& other) noexcept : process_(other.process_), descriptor_(std::exchange(other.descriptor_, -1)) {}

ProcessWatch::~ProcessWatch() {
  if (descriptor_ >= 0) ::close(descriptor_);
}

bool ProcessWatch::alive() const {
  if (descriptor_ < 0) return started(process_.pid) == process_.start_time;
  pollfd ended{.fd = descriptor_, .events = POLLIN, .revents = 0};
  return ::poll(&ended, 1, 0) == 0;
}

}  // namespace tessera::comm::shm
