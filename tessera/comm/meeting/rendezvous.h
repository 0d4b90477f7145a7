#pragma once

#include <chrono>
#include <string>
#include <vector>

#include <c10/util/intrusive_ptr.h>

#include "tessera/comm/world.h"

namespace tessera::comm {

/// Where the ranks met.
struct Meeting {
  c10::intrusive_ptr<c10d::Store> store;
  std::string master_addr;    ///< under which the store was reached
  std::string local_address;  ///< of this rank's host, on the way to the master; empty where that is unknown
};

/// Opens the store in which all ranks of `environment` meet: rank 0 serves it on master_port, unless the launcher does; the others try until it is served. All
/// then wait until every rank has announced itself. Where mpirun leaves the address or the port open, rank 0 serves on a port that the kernel chooses and tells
/// the others through MPI (backends/mpi/library.h), which stays open for comm.backend = mpi only.
///
/// After `timeout` at most throws CommError with address, port, cause, the ranks that have not come and the seconds waited. Throws ConfigError where the
/// address is open and this build has no MPI.
Meeting rendezvous(const Environment& environment, std::chrono::milliseconds timeout, const std::string& backend = "auto");

}  // namespace tessera::comm
