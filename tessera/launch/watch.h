#pragma once

#include <chrono>
#include <optional>
#include <vector>

#include "tessera/launch/workers.h"

/// How the workers of one attempt on this machine end. Not part of the public surface.
namespace tessera::launch {

/// Sees the workers to their end: notes who ended by itself, hands on requests to end, and ends those that do not obey.
class Watch {
 public:
  using Clock = std::chrono::steady_clock;

  explicit Watch(const std::vector<WorkerPlan>& plans) { workers_.start(plans); }

  /// Asks all that run to end by `signal`, once, and kills them after `grace`. A later call can only shorten the time that is left.
  void stop(int signal, Clock::duration grace, Clock::time_point now);

  /// Takes note of what happened; to be called again and again.
  void poll(Clock::time_point now);

  bool running() const { return workers_.running(); }
  /// To end.
  bool asked() const { return stopped_; }
  /// All have ended with 0, before they were asked to end.
  bool done() const { return !running() && clean_ && !stopped_; }
  /// All have ended with 0, asked or not.
  bool clean() const { return !running() && clean_; }
  /// One has failed, long enough ago that the rank that caused it has been seen too, where another one noticed sooner.
  bool failed(Clock::time_point now) const;
  /// Failures before the workers were asked to end, in the order in which they were seen. Those that we caused ourselves explain nothing.
  const std::vector<Ending>& failures() const { return failures_; }

 private:
  Workers workers_;
  std::vector<Ending> failures_;
  bool clean_ = true;
  bool stopped_ = false;
  std::optional<Clock::time_point> first_failure_;
  std::optional<Clock::time_point> kill_at_;
};

}  // namespace tessera::launch
