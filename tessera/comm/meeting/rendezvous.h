#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#include <c10/util/intrusive_ptr.h>

#include "tessera/comm/world.h"

namespace tessera::comm {

/// Where the ranks met.
struct Meeting {
  c10::intrusive_ptr<c10d::Store> store;  ///< keys of this world alone (next_world)
  std::string master_addr;                ///< under which the store was reached
  std::string local_address;              ///< of this rank's host, on the way to the master; empty where that is unknown
};

/// Opens the store in which all ranks of `environment` meet: rank 0 serves it on master_port, unless the launcher does; the others try until it is served. All
/// then wait until every rank has announced itself. Where mpirun leaves the address or the port open, rank 0 serves on a port that the kernel chooses and tells
/// the others through MPI (backends/mpi/library.h), which stays open for comm.backend = mpi only.
///
/// After `timeout` at most throws CommError with address, port, cause, the ranks that have not come and the seconds waited. Throws ConfigError where the
/// address is open and this build has no MPI.
Meeting rendezvous(const Environment& environment, std::chrono::milliseconds timeout, const std::string& backend = "auto");

/// A world's part of a store.
struct NextWorld {
  c10::intrusive_ptr<c10d::Store> store;  ///< no other world finds its keys
  int64_t number = 0;                     ///< of worlds that this rank of as many began there before, in the same attempt
};

/// Whether ranks say in a world's store that they have come (rendezvous), or meet by what they make there.
enum class Arrival : uint8_t { Announced, Unannounced };

/// Begins this rank's next world in a store that may outlive worlds, and the processes that make them. The ranks meet where each has begun as many: each makes
/// the same worlds one after the other, in one process or in several. Where ranks announce themselves, one that is started again before its first process had
/// seen all come goes on with that one's world, in which it was counted.
NextWorld next_world(c10::intrusive_ptr<c10d::Store> store, const Environment& environment, Arrival arrival);

}  // namespace tessera::comm
