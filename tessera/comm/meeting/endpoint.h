#pragma once

#include <chrono>
#include <optional>
#include <string>
#include <vector>

/// Addresses of stores: read, tried, listened on. What c10d does with them inside says neither address nor cause, and prints a stack trace for each failed try.
namespace tessera::comm {

struct Endpoint {
  std::string host{};  ///< a name or an address; IPv6 without brackets
  int port = 0;

  bool operator==(const Endpoint&) const = default;
};

/// "host:port", "[::1]:port"; without a port, `default_port`. Throws ConfigError that names `knob`.
Endpoint parse_endpoint(const std::string& text, const std::string& knob, int default_port);

/// "address 10.0.0.1, port 29400": how every message of ours names one.
std::string describe(const Endpoint& endpoint);

/// What came of a connection that is hung up at once.
struct Probe {
  std::string problem{};        ///< empty: somebody listens
  bool refused = false;         ///< the host answered that nobody listens: a process that listened there before is gone
  std::string local_address{};  ///< this host's end of the connection
};

/// Tries every address of the host once, each for at most `patience`.
Probe probe(const Endpoint& endpoint, std::chrono::milliseconds patience);

/// Tries each endpoint so, all at once: takes as long as the slowest of them.
std::vector<Probe> probe_all(const std::vector<Endpoint>& endpoints, std::chrono::milliseconds patience);

/// Whether the name or address is one of this host. False for a name that does not resolve.
bool is_local(const std::string& host);

/// "localhost", "127.*" or "::1".
bool is_loopback(const std::string& host);

/// A socket that listens, closed by its destructor.
class Listener {
 public:
  explicit Listener(int descriptor, std::string address);
  ~Listener();
  Listener(Listener&& other) noexcept;
  Listener& operator=(Listener&&) = delete;

  int port() const { return port_; }
  /// An address of this very host under which the socket is reached.
  const std::string& address() const { return address_; }
  /// Hands the descriptor to whoever closes it.
  int release();

 private:
  int descriptor_ = -1;
  int port_ = 0;
  std::string address_;
};

/// Listens on the endpoint's port (0: any free one) of its address alone. Of all interfaces and both families where the host is a name other than localhost,
/// which others may read as another address of this host than we do, or an address that this host does not have itself (of a router before it).
/// Nothing where the port is taken: another process of this host listens there. Throws CommError with address, port and cause.
std::optional<Listener> try_listen(const Endpoint& endpoint);

}  // namespace tessera::comm
