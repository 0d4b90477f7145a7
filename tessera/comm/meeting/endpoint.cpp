#include "tessera/comm/meeting/endpoint.h"

#include <cerrno>
#include <charconv>
#include <cstring>
#include <future>
#include <memory>
#include <system_error>
#include <utility>

#include <arpa/inet.h>
#include <netdb.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include "tessera/core/error.h"

// Only a connection tells a host where nobody listens (refused: whoever listened there is gone) from one that is silent (down, or behind a wall), and launchers
// act on the difference. It is not blocking, since the kernel's own patience is minutes. A server's last connections keep its port for a minute after it has
// gone: SO_REUSEADDR lets the next attempt have it at once.

namespace tessera::comm {
namespace {

using Addresses = std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)>;

/// The addresses of a host, or the resolver's reason in `problem`.
Addresses resolve(const std::string& host, int port, std::string& problem) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  if (const int error = ::getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &found)) {
    problem = detail::concat("the name does not resolve: ", ::gai_strerror(error));
    found = nullptr;
  }
  return {found, &::freeaddrinfo};
}

class Socket {
 public:
  explicit Socket(int family) : descriptor_(::socket(family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0)) {}
  ~Socket() {
    if (descriptor_ >= 0) ::close(descriptor_);
  }
  Socket(const Socket&) = delete;
  Socket& operator=(const Socket&) = delete;
  int get() const { return descriptor_; }

 private:
  int descriptor_;
};

/// 0 or an errno.
int connect_within(const Socket& socket, const addrinfo& address, std::chrono::milliseconds patience) {
  if (socket.get() < 0) return errno;
  if (::connect(socket.get(), address.ai_addr, address.ai_addrlen) == 0) return 0;
  if (errno != EINPROGRESS) return errno;
  pollfd writable{.fd = socket.get(), .events = POLLOUT, .revents = 0};
  if (::poll(&writable, 1, static_cast<int>(patience.count())) != 1) return ETIMEDOUT;
  int error = 0;
  socklen_t length = sizeof error;
  ::getsockopt(socket.get(), SOL_SOCKET, SO_ERROR, &error, &length);
  return error;
}

std::string own_address(const Socket& socket) {
  sockaddr_storage address{};
  socklen_t size = sizeof address;
  char text[NI_MAXHOST] = "";
  if (::getsockname(socket.get(), reinterpret_cast<sockaddr*>(&address), &size) != 0) return {};
  ::getnameinfo(reinterpret_cast<sockaddr*>(&address), size, text, sizeof text, nullptr, 0, NI_NUMERICHOST);
  return text;
}

/// Binds and listens; 0 or an errno.
int listen_on(int descriptor, const sockaddr* address, socklen_t size) {
  const int on = 1;
  ::setsockopt(descriptor, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
  if (::bind(descriptor, address, size) != 0) return errno;
  return ::listen(descriptor, SOMAXCONN) == 0 ? 0 : errno;
}

struct Bound {
  int descriptor = -1;
  int error = 0;
};

Bound listen_ipv6(int port, const in6_addr& address) {
  const int descriptor = ::socket(AF_INET6, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (descriptor < 0) return {-1, errno};
  const int off = 0;
  ::setsockopt(descriptor, IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof off);
  sockaddr_in6 socket_address{};
  socket_address.sin6_family = AF_INET6;
  socket_address.sin6_port = htons(static_cast<uint16_t>(port));
  socket_address.sin6_addr = address;
  const int error = listen_on(descriptor, reinterpret_cast<const sockaddr*>(&socket_address), sizeof socket_address);
  if (error == 0) return {descriptor, 0};
  ::close(descriptor);
  return {-1, error};
}

Bound listen_ipv4(int port, uint32_t address) {
  const int descriptor = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (descriptor < 0) return {-1, errno};
  sockaddr_in socket_address{};
  socket_address.sin_family = AF_INET;
  socket_address.sin_port = htons(static_cast<uint16_t>(port));
  socket_address.sin_addr.s_addr = htonl(address);
  const int error = listen_on(descriptor, reinterpret_cast<const sockaddr*>(&socket_address), sizeof socket_address);
  if (error == 0) return {descriptor, 0};
  ::close(descriptor);
  return {-1, error};
}

struct Listening {
  int descriptor = -1;
  int error = 0;
  std::string address;  ///< under which this host reaches it
};

Listening listen_everywhere(int port) {
  const Bound both = listen_ipv6(port, in6addr_any);
  const Bound any = both.error == 0 || both.error == EADDRINUSE ? both : listen_ipv4(port, INADDR_ANY);  // a kernel without IPv6
  return {any.descriptor, any.error, "127.0.0.1"};
}

Listening start_listening(const Endpoint& endpoint) {
  const std::string host = endpoint.host == "localhost" ? "127.0.0.1" : endpoint.host;
  in_addr four{};
  in6_addr six{};
  Bound bound{-1, EADDRNOTAVAIL};
  if (::inet_pton(AF_INET, host.c_str(), &four) == 1 && four.s_addr != INADDR_ANY) bound = listen_ipv4(endpoint.port, ntohl(four.s_addr));
  if (::inet_pton(AF_INET6, host.c_str(), &six) == 1 && !IN6_IS_ADDR_UNSPECIFIED(&six)) bound = listen_ipv6(endpoint.port, six);
  const bool is_ours = bound.error == 0 || bound.error == EADDRINUSE || bound.error == EACCES;
  if (!is_ours && !is_loopback(host)) return listen_everywhere(endpoint.port);
  return {bound.descriptor, bound.error, host};
}

int port_of(int descriptor) {
  sockaddr_storage address{};
  socklen_t size = sizeof address;
  ::getsockname(descriptor, reinterpret_cast<sockaddr*>(&address), &size);
  return ntohs(address.ss_family == AF_INET6 ? reinterpret_cast<sockaddr_in6&>(address).sin6_port : reinterpret_cast<sockaddr_in&>(address).sin_port);
}

}  // namespace

Endpoint parse_endpoint(const std::string& text, const std::string& knob, int default_port) {
  const auto refuse = [&](const char* rule) { require(false, knob, " = \"", text, "\": ", rule, "; write HOST:PORT, as in 10.0.0.1:29400 or [::1]:29400"); };
  Endpoint endpoint{text, default_port};
  std::string port;
  if (text.starts_with('[')) {
    const size_t end = text.find(']');
    if (end == std::string::npos) refuse("the bracket is not closed");
    endpoint.host = text.substr(1, end - 1);
    if (end + 1 < text.size()) {
      if (text[end + 1] != ':') refuse("after the bracket there must be a colon and a port");
      port = text.substr(end + 2);
      if (port.empty()) refuse("there is no port after the colon");
    }
  } else if (const size_t colon = text.rfind(':'); colon != std::string::npos && text.find(':') == colon) {
    endpoint.host = text.substr(0, colon);
    port = text.substr(colon + 1);
    if (port.empty()) refuse("there is no port after the colon");
  }
  if (endpoint.host.empty()) refuse("there is no host");
  if (!port.empty()) {
    const auto [end, error] = std::from_chars(port.data(), port.data() + port.size(), endpoint.port);
    if (error != std::errc() || end != port.data() + port.size() || endpoint.port < 0 || endpoint.port > 65535) refuse("the port must be a number, 0 to 65535");
  }
  return endpoint;
}

std::string describe(const Endpoint& endpoint) { return detail::concat("address ", endpoint.host, ", port ", endpoint.port); }

Probe probe(const Endpoint& endpoint, std::chrono::milliseconds patience) {
  Probe result;
  const Addresses addresses = resolve(endpoint.host, endpoint.port, result.problem);
  bool all_refused = addresses != nullptr;
  for (const addrinfo* address = addresses.get(); address != nullptr; address = address->ai_next) {
    const Socket socket(address->ai_family);
    const int error = connect_within(socket, *address, patience);
    if (error == 0) return {.problem = {}, .refused = false, .local_address = own_address(socket)};
    all_refused = all_refused && error == ECONNREFUSED;
    result.problem = std::strerror(error);
  }
  result.refused = all_refused;
  return result;
}

std::vector<Probe> probe_all(const std::vector<Endpoint>& endpoints, std::chrono::milliseconds patience) {
  std::vector<std::future<Probe>> asked;  // one after the other where no thread can be started
  for (const Endpoint& endpoint : endpoints) asked.push_back(std::async([&endpoint, patience] { return probe(endpoint, patience); }));
  std::vector<Probe> found;
  for (auto& answer : asked) found.push_back(answer.get());
  return found;
}

bool is_local(const std::string& host) {
  std::string problem;
  const Addresses addresses = resolve(host, 0, problem);
  for (const addrinfo* address = addresses.get(); address != nullptr; address = address->ai_next) {
    const Socket socket(address->ai_family);
    if (socket.get() >= 0 && ::bind(socket.get(), address->ai_addr, address->ai_addrlen) == 0) return true;
  }
  return false;
}

bool is_loopback(const std::string& host) { return host == "localhost" || host == "::1" || host.starts_with("127."); }

std::optional<Listener> try_listen(const Endpoint& endpoint) {
  const Listening listening = start_listening(endpoint);
  if (listening.error == EADDRINUSE) return std::nullopt;
  if (listening.error != 0) throw CommError(detail::concat("cannot listen at ", describe(endpoint), ": ", std::strerror(listening.error)));
  return Listener(listening.descriptor, listening.address);
}

Listener::Listener(int descriptor, std::string address) : descriptor_(descriptor), port_(port_of(descriptor)), address_(std::move(address)) {}

Listener::~Listener() {
  if (descriptor_ >= 0) ::close(descriptor_);
}

Listener::Listener(Listener&& other) noexcept : descriptor_(std::exchange(other.descriptor_, -1)), port_(other.port_), address_(std::move(other.address_)) {}

int Listener::release() { return std::exchange(descriptor_, -1); }

}  // namespace tessera::comm
