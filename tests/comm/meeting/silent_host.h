#pragma once

#include <array>

#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

namespace tessera::comm::testing_support {

/// A port of this host at which no connection is answered, as none is of a host that is down: its listener's queue is full.
class SilentHost {
 public:
  SilentHost() {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t size = sizeof address;
    auto* const place = reinterpret_cast<sockaddr*>(&address);
    ::bind(sockets_[0], place, size);
    ::listen(sockets_[0], 0);
    ::getsockname(sockets_[0], place, &size);
    port_ = ntohs(address.sin_port);
    for (size_t i = 1; i < sockets_.size(); ++i) ::connect(sockets_[i], place, size);
  }
  ~SilentHost() {
    for (const int socket : sockets_) ::close(socket);
  }
  SilentHost(const SilentHost&) = delete;
  SilentHost& operator=(const SilentHost&) = delete;

  int port() const { return port_; }

 private:
  static int make() { return ::socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0); }
  std::array<int, 4> sockets_{make(), make(), make(), make()};
  int port_ = 0;
};

}  // namespace tessera::comm::testing_support
