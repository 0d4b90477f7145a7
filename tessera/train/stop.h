#pragma once

#include <chrono>
#include <initializer_list>
#include <vector>

#include <signal.h>

namespace tessera {

/// Turns signals that ask this process to end into a request that a run asks for between steps: the first is kept, the same signal within `one_request` of it
/// is the same request (who ends all processes of a job reaches a rank itself and by its launcher), and later once more it ends the process at once, as it
/// would have without us. Handlers are of the process: ranks as threads share one object. One at a time.
class StopSignals {
 public:
  explicit StopSignals(std::initializer_list<int> signals = {SIGTERM}, std::chrono::nanoseconds one_request = std::chrono::seconds(1));
  ~StopSignals();
  StopSignals(const StopSignals&) = delete;
  StopSignals& operator=(const StopSignals&) = delete;

  /// The first signal that came since this object was made; 0 if none did.
  int received() const;

  /// `signal`, one of these, is ignored as soon as this object goes, with no moment between; else it does then what it did before.
  void leave_ignored(int signal);

 private:
  struct Saved {
    int signal;
    struct sigaction action;
  };
  std::vector<Saved> before_;
};

}  // namespace tessera
