#include "tessera/launch/signals.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstring>

#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "tessera/core/error.h"

// Masks and signalfd would do if all threads were ours. But threads that libraries started before do not block these signals, and one of them taking SIGTERM
// would end the process: so there is a handler, which does nothing but note the signal and ring an eventfd. The wait unblocks in ppoll only, in one step with
// the waiting: a signal that comes just before is not slept through.

namespace tessera::launch {
namespace {

constexpr std::array kSignals{SIGINT, SIGTERM, SIGCHLD, SIGHUP};

// What the handler may touch. A signal goes to the process, so these are the process's.
std::atomic<int> bell = -1;    ///< made once and never closed: a handler on another thread may be about to ring it
std::atomic<int> arrived = 0;  ///< the first that nobody has asked for yet, SIGCHLD aside
std::atomic<bool> in_use = false;
static_assert(std::atomic<int>::is_always_lock_free);

void ring_bell(int descriptor) {
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t size = write(descriptor, &one, sizeof one);  // full: it rings already
}

void catch_signal(int signal) {
  const int error = errno;
  int none = 0;
  if (signal != SIGCHLD) arrived.compare_exchange_strong(none, signal);
  ring_bell(bell);
  errno = error;
}

int make_bell() {
  const int descriptor = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  invariant(descriptor >= 0, "eventfd: ", std::strerror(errno));
  return descriptor;
}

void silence_bell(int descriptor) {
  uint64_t count = 0;
  [[maybe_unused]] const ssize_t size = ::read(descriptor, &count, sizeof count);
}

bool is_ignored(int signal) {
  struct sigaction action{};
  return sigaction(signal, nullptr, &action) == 0 && action.sa_handler == SIG_IGN;
}

}  // namespace

Wake::Wake() : descriptor_(make_bell()) {}
Wake::~Wake() { close(descriptor_); }
void Wake::ring() const { ring_bell(descriptor_); }
void Wake::silence() const { silence_bell(descriptor_); }

CaughtSignals::CaughtSignals() {
  invariant(!in_use.exchange(true), "a second launcher in a process that is one already");
  if (bell < 0) bell = make_bell();
  arrived = 0;
  sigset_t caught;
  sigemptyset(&caught);
  struct sigaction action{};
  action.sa_handler = catch_signal;
  action.sa_flags = SA_RESTART;
  for (const int signal : kSignals) {
    if (signal == SIGHUP && is_ignored(signal)) continue;
    sigaddset(&caught, signal);
    Saved& saved = before_.emplace_back(Saved{signal, {}});
    sigaction(signal, &action, &saved.action);
  }
  // Whoever reads what the ranks print may go before they end.
  struct sigaction ignored{};
  ignored.sa_handler = SIG_IGN;
  Saved& pipe = before_.emplace_back(Saved{SIGPIPE, {}});
  sigaction(SIGPIPE, &ignored, &pipe.action);
  pthread_sigmask(SIG_BLOCK, &caught, &mask_before_);
  mask_in_wait_ = mask_before_;
  for (const Saved& saved : before_) sigdelset(&mask_in_wait_, saved.signal);
}

CaughtSignals::~CaughtSignals() {
  for (const Saved& saved : before_) sigaction(saved.signal, &saved.action, nullptr);
  pthread_sigmask(SIG_SETMASK, &mask_before_, nullptr);
  in_use = false;
}

std::optional<int> CaughtSignals::wait(const Wake& wake, std::chrono::milliseconds patience) const {
  std::array<pollfd, 2> ready{{{.fd = bell, .events = POLLIN, .revents = 0}, {.fd = wake.descriptor(), .events = POLLIN, .revents = 0}}};
  const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(patience);
  const timespec longest{.tv_sec = seconds.count(), .tv_nsec = std::chrono::nanoseconds(patience - seconds).count()};
  ppoll(ready.data(), ready.size(), &longest, &mask_in_wait_);
  wake.silence();
  silence_bell(bell);
  const int signal = arrived.exchange(0);
  return signal != 0 ? std::optional(signal) : std::nullopt;
}

bool CaughtSignals::one_waits() {
  sigset_t pending;
  sigemptyset(&pending);
  sigpending(&pending);
  return arrived != 0 || std::ranges::any_of(kSignals, [&](int signal) { return signal != SIGCHLD && sigismember(&pending, signal) == 1; });
}

void CaughtSignals::restore_defaults() {
  for (const int signal : kSignals) {
    if (!is_ignored(signal)) ::signal(signal, SIG_DFL);
  }
  for (const int signal : {SIGPIPE, SIGXFSZ}) ::signal(signal, SIG_DFL);  // which we ignore, and programs need not
}

}  // namespace tessera::launch
