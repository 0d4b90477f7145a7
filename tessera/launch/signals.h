#pragma once

#include <chrono>
#include <optional>

#include <signal.h>

/// The signals a launcher waits for, and the waiting. Not part of the public surface.
namespace tessera::launch {

/// Another thread's way to end a wait.
class Wake {
 public:
  Wake();
  ~Wake();
  Wake(const Wake&) = delete;
  Wake& operator=(const Wake&) = delete;

  void ring() const;
  void silence() const;
  int descriptor() const { return descriptor_; }

 private:
  int descriptor_;
};

/// Blocks SIGINT, SIGTERM, SIGCHLD, and SIGHUP unless it is ignored (nohup means what it says), in this thread and in those that it starts; restores the mask
/// at the end.
class BlockedSignals {
 public:
  BlockedSignals();
  ~BlockedSignals();
  BlockedSignals(const BlockedSignals&) = delete;
  BlockedSignals& operator=(const BlockedSignals&) = delete;

  /// Until a signal comes, `wake` rings or `patience` is over. Returns a signal other than SIGCHLD if one came.
  std::optional<int> wait(const Wake& wake, std::chrono::milliseconds patience) const;

 private:
  sigset_t signals_, before_;
  int descriptor_;
};

}  // namespace tessera::launch
