#pragma once

#include <c10/core/ScalarType.h>
#include <mpi.h>
#include <torch/csrc/distributed/c10d/Types.hpp>

namespace tessera::comm::mpi {

/// MPI's type for arithmetic on a dtype. Throws std::runtime_error for a dtype that MPI cannot compute with.
MPI_Datatype reduced_type(c10::ScalarType dtype);

/// A type of that many bytes, for what is only moved.
MPI_Datatype moved_type(int64_t bytes);

/// Throws std::runtime_error for what MPI has no operation for.
MPI_Op op_of(const c10d::ReduceOp& op);

}  // namespace tessera::comm::mpi
