#pragma once

#include <memory>
#include <string>

#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "tessera/comm/backends/factory.h"

namespace tessera::comm {

/// What libtessera_mpi offers. It is a library of its own, loaded when first asked for, so that libtessera runs where there is no MPI. It is MPI's rule that a
/// process is one rank, so the object is the process's.
class MpiLibrary {
 public:
  virtual ~MpiLibrary() = default;

  /// Rank 0's text, on every rank. Collective over the processes of mpirun. Starts MPI, and ends it again unless `stay`: MPI can be started once, and a process
  /// that holds it open may not end without the others. Throws ConfigError where MPI does not see this rank and size, CommError where MPI has ended.
  virtual std::string share(const Environment& environment, const std::string& text, bool stay) = 0;

  /// Starts MPI unless it runs. Throws as above.
  virtual std::unique_ptr<EngineFactory> make_factory(const EngineOptions& options) = 0;

  /// Where the worlds of this process meet, one after the other, once they have learned it.
  struct MeetingPlace {
    std::string told;                        ///< what rank 0 shared; empty before
    c10::intrusive_ptr<c10d::Store> served;  ///< at rank 0: lives as long as the process, for MPI cannot be asked again
  };
  MeetingPlace meeting_place;
};

/// Loads libtessera_mpi from beside this library. Throws ConfigError, saying why and the way out, where that fails.
MpiLibrary& mpi_library();

/// Why there is no libtessera_mpi, with the way out; empty where there is one.
std::string mpi_library_missing();

/// The name under which libtessera_mpi exports `MpiLibrary& (*)()`.
inline constexpr const char* kMpiEntry = "tessera_mpi_library";

}  // namespace tessera::comm
