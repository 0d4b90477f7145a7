#pragma once

#include <chrono>

#include <c10/util/intrusive_ptr.h>

#include "tessera/comm/world.h"

namespace tessera::comm {

/// Opens the store in which all ranks of `environment` meet: rank 0 serves it on master_port, unless the launcher does. A client tries until it is served, the
/// server waits until all ranks have come. Throws CommError with address, port, cause and seconds waited, after `timeout` at most.
c10::intrusive_ptr<c10d::Store> rendezvous(const Environment& environment, std::chrono::milliseconds timeout);

}  // namespace tessera::comm
