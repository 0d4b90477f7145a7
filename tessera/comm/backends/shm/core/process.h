#pragma once

#include <cstdint>

#include <sys/types.h>

namespace tessera::comm::shm {

/// A process, told apart from a later one with the same number by when it started (clock ticks since boot; 0 where it is gone).
struct ProcessId {
  pid_t pid = 0;
  uint64_t start_time = 0;
  static ProcessId self();
};

/// Watches another process, also one of which this process is not the parent.
class ProcessWatch {
 public:
  explicit ProcessWatch(const ProcessId& process);
  ProcessWatch(ProcessWatch&& other) noexcept;
  ProcessWatch& operator=(ProcessWatch&&) = delete;
  ~ProcessWatch();

  /// Whether it still runs; stopped counts, a zombie does not. A few microseconds.
  bool alive() const;

 private:
  ProcessId process_;
  int descriptor_ = -1;  ///< a pidfd, where the kernel has them
};

}  // namespace tessera::comm::shm
