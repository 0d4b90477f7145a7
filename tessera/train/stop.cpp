#include "tessera/train/stop.h"

#include <atomic>

#include "tessera/core/error.h"

namespace tessera {
namespace {

// What a handler may touch: signals are sent to processes, so these are the process's.
std::atomic<int> first_signal = 0;
std::atomic<bool> in_use = false;
static_assert(std::atomic<int>::is_always_lock_free);

void note(int signal) {
  int none = 0;
  first_signal.compare_exchange_strong(none, signal);
}

}  // namespace

StopSignals::StopSignals(std::initializer_list<int> signals) {
  invariant(!in_use.exchange(true), "a second StopSignals while the first lives");
  first_signal = 0;
  struct sigaction action{};
  action.sa_handler = note;
  action.sa_flags = SA_RESTART | static_cast<int>(SA_RESETHAND);  // once: the second ends the process
  for (const int signal : signals) {
    Saved& saved = before_.emplace_back(Saved{signal, {}});
    sigaction(signal, &action, &saved.action);
  }
}

StopSignals::~StopSignals() {
  for (const Saved& saved : before_) sigaction(saved.signal, &saved.action, nullptr);
  in_use = false;
}

int StopSignals::received() const { return first_signal; }

}  // namespace tessera
