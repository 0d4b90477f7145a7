#pragma once

#include <chrono>
#include <optional>

#include <c10/util/intrusive_ptr.h>

#include "tessera/comm/meeting/endpoint.h"

namespace c10d {
class Store;
class TCPStore;
}  // namespace c10d

/// c10d's stores, served and joined without its stack traces, and served nowhere but where they are said to be. Not part of the public surface.
namespace tessera::comm {

/// Serves a store at the endpoint (port 0: any free one) as long as the object lives, to those alone who reach the address that it names (try_listen): anybody
/// who reaches a store reads and writes it. Nothing where another process of this host has the port.
/// Throws CommError with address, port and cause where nobody can listen there.
c10::intrusive_ptr<c10d::TCPStore> serve_store(const Endpoint& endpoint);

/// A client of the store at the endpoint. Takes at most twice `patience`. Throws CommError with the cause.
c10::intrusive_ptr<c10d::Store> join_store(const Endpoint& endpoint, std::chrono::milliseconds patience);

}  // namespace tessera::comm
