#pragma once

#include <c10/core/ScalarType.h>
#include <mpi.h>

#include "tessera/comm/operation.h"

namespace tessera::comm::mpi {

/// MPI's type for arithmetic on a dtype. Throws std::runtime_error for a dtype that MPI cannot compute with.
MPI_Datatype reduced_type(c10::ScalarType dtype);

/// A type of that many bytes, for what is only moved.
MPI_Datatype moved_type(int64_t bytes);

MPI_Op op_of(Op op);

}  // namespace tessera::comm::mpi
