#pragma once

#include <chrono>
#include <optional>
#include <vector>

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

/// Catches SIGINT, SIGTERM, SIGCHLD, and SIGHUP unless it is ignored (nohup means what it says), whichever thread of the process the kernel gives them to:
/// threads that were there before (a pool that prepared the text) do not block them and would end the process by taking one. This thread and those that it
/// starts from here on block them, so that none of their calls is interrupted, but for `wait`. One object at a time; the end restores handlers and mask.
class CaughtSignals {
 public:
  CaughtSignals();
  ~CaughtSignals();
  CaughtSignals(const CaughtSignals&) = delete;
  CaughtSignals& operator=(const CaughtSignals&) = delete;

  /// Until a signal comes, `wake` rings or `patience` is over. Returns a signal other than SIGCHLD if one came. From the thread that made the object.
  std::optional<int> wait(const Wake& wake, std::chrono::milliseconds patience) const;

  /// Whether one but SIGCHLD has come that nobody has asked for yet. From any thread.
  static bool one_waits();

  /// For a child between fork and exec: what it does when a signal comes is not ours.
  static void restore_defaults();

 private:
  struct Saved {
    int signal;
    struct sigaction action;
  };
  std::vector<Saved> before_;
  sigset_t mask_before_{}, mask_in_wait_{};
};

}  // namespace tessera::launch
