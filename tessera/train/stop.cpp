#include "tessera/train/stop.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <cstdint>
#include <utility>

#include <ATen/ops/empty.h>
#include <time.h>

#include "tessera/comm/call_site.h"
#include "tessera/comm/collectives.h"
#include "tessera/core/error.h"

// Whoever ends a job tells all of its processes at once (systemd, scancel, a container's end), and the launcher among them tells its ranks once more. That is
// one request, which reaches a rank twice within moments; a person who asks again, because nothing seems to happen, has waited longer.

namespace tessera {
namespace {

// What a handler may touch: signals are sent to processes, so these are the process's.
std::atomic<int> first_signal = 0;
std::atomic<int64_t> one_request_ns = 0;
std::array<std::atomic<int64_t>, NSIG> first_came{};  ///< when each signal came first, on the monotonic clock; 0: not yet
std::atomic<bool> in_use = false;
static_assert(std::atomic<int>::is_always_lock_free && std::atomic<int64_t>::is_always_lock_free);

/// Safe in a handler, as all of `note` is.
int64_t now_ns() {
  timespec now{};
  ::clock_gettime(CLOCK_MONOTONIC, &now);
  return int64_t{now.tv_sec} * 1'000'000'000 + now.tv_nsec;
}

void note(int signal) {
  const int error = errno;
  const int64_t now = now_ns();
  int64_t first = 0;
  int none = 0;
  if (first_came[static_cast<size_t>(signal)].compare_exchange_strong(first, now)) {
    first_signal.compare_exchange_strong(none, signal);
  } else if (now - first >= one_request_ns) {
    ::signal(signal, SIG_DFL);
    ::raise(signal);  // comes when this handler returns
  }
  errno = error;
}

}  // namespace

StopSignals::StopSignals(std::initializer_list<int> signals, std::chrono::nanoseconds one_request) {
  invariant(!in_use.exchange(true), "a second StopSignals while the first lives");
  first_signal = 0;
  one_request_ns = one_request.count();
  for (auto& came : first_came) came = 0;
  struct sigaction action{};
  action.sa_handler = note;
  action.sa_flags = SA_RESTART;
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

void StopSignals::leave_ignored(int signal) {
  for (Saved& saved : before_) {
    if (saved.signal != signal) continue;
    saved.action = {};
    saved.action.sa_handler = SIG_IGN;
  }
}

StopVote::StopVote(comm::Group group, std::function<int()> signal) : group_(std::move(group)), signal_(std::move(signal)) {}

bool StopVote::stops() {
  if (request_ || rounds_left_-- > 0) return request_.has_value();
  constexpr double kBetween = 1, kHasRoom = kBetween / 2;  // seconds
  const auto now = Clock::now();
  const double passed = asked_ ? std::chrono::duration<double>(now - *asked_).count() : kBetween;
  const comm::CallSite site("stop");
  const at::Tensor mine = at::empty({2}, at::device(at::kCPU).dtype(at::kDouble));
  mine.mutable_data_ptr<double>()[0] = signal_ ? signal_() : 0;
  mine.mutable_data_ptr<double>()[1] = passed;
  const at::Tensor all = at::empty({2 * group_.size()}, mine.options());
  comm::all_gather(group_, all, mine);
  double slowest = 0;  // agreed on, or ranks would ask before other rounds
  for (int rank = 0; rank < group_.size(); ++rank) {
    const double* const its = all.const_data_ptr<double>() + 2 * rank;
    if (its[0] != 0 && !request_) request_ = {.rank = group_.world_rank(rank), .signal = static_cast<int>(its[0])};
    slowest = std::max(slowest, its[1]);
  }
  if (slowest < kHasRoom) rounds_between_ *= 2;
  if (slowest > kBetween) rounds_between_ = std::max<int64_t>(rounds_between_ / 2, 1);
  asked_ = now;
  rounds_left_ = rounds_between_ - 1;
  return request_.has_value();
}

}  // namespace tessera
