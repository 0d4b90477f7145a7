#include "tessera/comm/rendezvous.h"

#include <algorithm>
#include <cstring>
#include <thread>

#include <fcntl.h>
#include <netdb.h>
#include <poll.h>
#include <sys/socket.h>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>
#include <unistd.h>

#include "tessera/comm/failure.h"
#include "tessera/core/error.h"

namespace tessera::comm {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

// Connects and hangs up; returns 0 or an errno.
int try_address(const addrinfo& address, milliseconds patience) {
  const int descriptor = ::socket(address.ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  if (descriptor < 0) return errno;
  int error = ::connect(descriptor, address.ai_addr, address.ai_addrlen) == 0 ? 0 : errno;
  if (error == EINPROGRESS) {
    pollfd writable{.fd = descriptor, .events = POLLOUT, .revents = 0};
    error = ETIMEDOUT;
    if (::poll(&writable, 1, static_cast<int>(patience.count())) == 1) {
      socklen_t length = sizeof(error);
      ::getsockopt(descriptor, SOL_SOCKET, SO_ERROR, &error, &length);
    }
  }
  ::close(descriptor);
  return error;
}

// Tries each address of the host once; returns what went wrong, empty if somebody listens.
std::string try_host(const std::string& host, int port, milliseconds patience) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  if (const int error = ::getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &found)) {
    return detail::concat("the name does not resolve: ", ::gai_strerror(error));
  }
  const std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)> addresses(found, &::freeaddrinfo);
  int error = 0;
  for (const auto* address = found; address; address = address->ai_next) {
    error = try_address(*address, patience);
    if (error == 0) return {};
  }
  return std::strerror(error);
}

// Torch's client would print a stack trace for each failed try and end with no more than "timed out".
void await_server(const std::string& host, int port, Clock::time_point deadline) {
  for (auto pause = milliseconds(10);; pause = std::min(2 * pause, milliseconds(500))) {
    const auto left = std::chrono::duration_cast<milliseconds>(deadline - Clock::now());
    const auto problem = try_host(host, port, std::clamp(left, milliseconds(1), milliseconds(5000)));
    if (problem.empty()) return;
    if (Clock::now() + pause > deadline) throw CommError(problem);
    std::this_thread::sleep_for(pause);
  }
}

}  // namespace

c10::intrusive_ptr<c10d::Store> rendezvous(const Environment& environment, milliseconds timeout) {
  const auto start = Clock::now();
  const bool serves = environment.rank == 0 && !environment.agent_store;
  try {
    if (!serves) await_server(environment.master_addr, environment.master_port, start + timeout);
    c10d::TCPStoreOptions options;
    options.port = static_cast<uint16_t>(environment.master_port);
    options.timeout = std::max(milliseconds(1), std::chrono::duration_cast<milliseconds>(start + timeout - Clock::now()));
    options.isServer = serves;
    options.waitWorkers = !environment.agent_store;
    if (!environment.agent_store) options.numWorkers = environment.size;
    return c10::make_intrusive<c10d::TCPStore>(environment.master_addr, options);
  } catch (...) {
    throw CommError(detail::concat("rank ", environment.rank, " of ", environment.size, ": no rendezvous at address ", environment.master_addr, ", port ",
                                   environment.master_port, " (served by ", environment.agent_store ? "the launcher" : "rank 0",
                                   "): ", message_of(std::current_exception()), "; waited ", seconds_since(start)));
  }
}

}  // namespace tessera::comm
