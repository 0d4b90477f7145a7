#include "tessera/launch/watch.h"

#include <algorithm>

#include <signal.h>

namespace tessera::launch {
namespace {

using namespace std::chrono_literals;

/// From the first failure to the end of the others. A lost connection is what others see first when a rank is busy dying, so it waits longer for its cause.
constexpr auto settle_time = 300ms;
constexpr auto settle_time_of_consequences = 2s;

}  // namespace

void Watch::stop(int signal, Clock::duration grace, Clock::time_point now) {
  if (!stopped_) workers_.send(signal);
  stopped_ = true;
  kill_at_ = std::min(kill_at_.value_or(now + grace), now + grace);
}

void Watch::poll(Clock::time_point now) {
  for (Ending& ending : workers_.reap()) {
    clean_ = clean_ && !ending.failed();
    if (stopped_ || !ending.failed()) continue;
    if (!first_failure_) first_failure_ = now;
    failures_.push_back(std::move(ending));
  }
  if (kill_at_ && now >= *kill_at_) workers_.send(SIGKILL);
}

bool Watch::failed(Clock::time_point now) const {
  if (!first_failure_) return false;
  const bool only_consequences = std::ranges::all_of(failures_, [](const Ending& ending) { return ending.is_consequence(); });
  return !running() || now >= *first_failure_ + (only_consequences ? Clock::duration(settle_time_of_consequences) : Clock::duration(settle_time));
}

}  // namespace tessera::launch
