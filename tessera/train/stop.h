#pragma once

#include <initializer_list>
#include <vector>

#include <signal.h>

namespace tessera {

/// Turns signals that ask this process to end into a request that a run asks for between steps: the first is kept, and the same signal once more does what
/// it would have done without us, which is to end the process at once. Handlers are of the process: ranks as threads share one object. One at a time.
class StopSignals {
 public:
  explicit StopSignals(std::initializer_list<int> signals = {SIGTERM});
  ~StopSignals();
  StopSignals(const StopSignals&) = delete;
  StopSignals& operator=(const StopSignals&) = delete;

  /// The first signal that came since this object was made; 0 if none did.
  int received() const;

 private:
  struct Saved {
    int signal;
    struct sigaction action;
  };
  std::vector<Saved> before_;
};

}  // namespace tessera
