#pragma once

#include <chrono>

namespace tessera::comm {

/// Seconds that this thread has spent in collectives since it began: starting them, and waiting for them. What is left of a step is its computing.
double waited_seconds();

/// Counts for as long as it lives; scopes within scopes count once. Costs two reads of the clock.
class Waiting {
 public:
  Waiting();
  ~Waiting();
  Waiting(const Waiting&) = delete;
  Waiting& operator=(const Waiting&) = delete;
};

/// Within it nothing counts: what happens inside a collective and is not waiting for others.
class NotWaiting {
 public:
  NotWaiting();
  ~NotWaiting();
  NotWaiting(const NotWaiting&) = delete;
  NotWaiting& operator=(const NotWaiting&) = delete;

 private:
  std::chrono::steady_clock::time_point start_;
};

}  // namespace tessera::comm
