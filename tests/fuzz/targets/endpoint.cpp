#include "tessera/comm/meeting/endpoint.h"

#include "tests/fuzz/target.h"

/// HOST:PORT of --rdzv-endpoint.
TESSERA_FUZZ_TARGET(endpoint) {
  using namespace tessera;
  fuzz::accepts("--rdzv-endpoint", [&] {
    const auto endpoint = comm::parse_endpoint(std::string(input), "--rdzv-endpoint", 29400);
    fuzz::expect(!endpoint.host.empty() && endpoint.port >= 0 && endpoint.port <= 65535, "host '", endpoint.host, "', port ", endpoint.port);
  });
}
