#include "tessera/launch/signals.h"

#include <array>
#include <cerrno>
#include <cstdint>
#include <cstring>

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/signalfd.h>
#include <unistd.h>

#include "tessera/core/error.h"

namespace tessera::launch {

Wake::Wake() : descriptor_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) { invariant(descriptor_ >= 0, "eventfd: ", std::strerror(errno)); }

Wake::~Wake() { close(descriptor_); }

void Wake::ring() const { eventfd_write(descriptor_, 1); }

void Wake::silence() const {
  uint64_t count = 0;
  [[maybe_unused]] const ssize_t size = read(descriptor_, &count, sizeof count);
}

BlockedSignals::BlockedSignals() {
  sigemptyset(&signals_);
  for (const int signal : {SIGINT, SIGTERM, SIGCHLD}) sigaddset(&signals_, signal);
  struct sigaction hangup{};
  if (sigaction(SIGHUP, nullptr, &hangup) == 0 && hangup.sa_handler != SIG_IGN) sigaddset(&signals_, SIGHUP);
  pthread_sigmask(SIG_BLOCK, &signals_, &before_);
  descriptor_ = signalfd(-1, &signals_, SFD_CLOEXEC | SFD_NONBLOCK);
  invariant(descriptor_ >= 0, "signalfd: ", std::strerror(errno));
}

BlockedSignals::~BlockedSignals() {
  close(descriptor_);
  pthread_sigmask(SIG_SETMASK, &before_, nullptr);
}

std::optional<int> BlockedSignals::wait(const Wake& wake, std::chrono::milliseconds patience) const {
  std::array<pollfd, 2> ready{{{.fd = descriptor_, .events = POLLIN, .revents = 0}, {.fd = wake.descriptor(), .events = POLLIN, .revents = 0}}};
  poll(ready.data(), ready.size(), static_cast<int>(patience.count()));
  wake.silence();
  signalfd_siginfo info{};
  while (read(descriptor_, &info, sizeof info) == sizeof info) {
    if (info.ssi_signo != SIGCHLD) return static_cast<int>(info.ssi_signo);
  }
  return std::nullopt;
}

}  // namespace tessera::launch
