#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <optional>
#include <vector>

#include <signal.h>

#include "tessera/comm/group.h"

namespace tessera {

/// A rank's wish that the run ends after a step.
struct StopRequest {
  int rank = 0;    ///< of the world: the first one that wishes it
  int signal = 0;  ///< that it got
};

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

/// Whether to stop in the midst of work of many short rounds, which ranks do without waiting for each other: they ask before the first round and then about
/// once a second, after so many rounds as all have seen that to take. Traffic of each time: one all-gather of two numbers.
class StopVote {
 public:
  /// `signal`: by which this rank was asked to stop, 0 if it was not.
  StopVote(comm::Group group, std::function<int()> signal);

  /// Collective: to be called before each round, of which every rank has the same number; all are told to stop before the same one.
  bool stops();

  /// Who wishes it; nothing as long as nobody does.
  const std::optional<StopRequest>& request() const { return request_; }

 private:
  using Clock = std::chrono::steady_clock;

  comm::Group group_;
  std::function<int()> signal_;
  std::optional<StopRequest> request_;
  std::optional<Clock::time_point> asked_;        ///< when ranks did last
  int64_t rounds_between_ = 1, rounds_left_ = 0;  ///< from one time to the next; until then
};

}  // namespace tessera
