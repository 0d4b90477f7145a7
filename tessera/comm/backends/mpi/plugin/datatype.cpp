#include "tessera/comm/backends/mpi/plugin/datatype.h"

#include <array>
#include <stdexcept>
#include <string>

namespace tessera::comm::mpi {

MPI_Datatype reduced_type(c10::ScalarType dtype) {
  switch (dtype) {
    case c10::ScalarType::Float:
      return MPI_FLOAT;
    case c10::ScalarType::Double:
      return MPI_DOUBLE;
    case c10::ScalarType::Byte:
      return MPI_UINT8_T;
    case c10::ScalarType::Char:
      return MPI_INT8_T;
    case c10::ScalarType::Short:
      return MPI_INT16_T;
    case c10::ScalarType::Int:
      return MPI_INT32_T;
    case c10::ScalarType::Long:
      return MPI_INT64_T;
    default:
      throw std::runtime_error(std::string("MPI does not compute with ") + c10::toString(dtype));
  }
}

MPI_Datatype moved_type(int64_t bytes) {
  switch (bytes) {
    case 1:
      return MPI_BYTE;
    case 2:
      return MPI_INT16_T;
    case 4:
      return MPI_INT32_T;
    case 8:
      return MPI_INT64_T;
    case 16:
      return MPI_C_DOUBLE_COMPLEX;
    default:
      throw std::runtime_error("MPI has no type of " + std::to_string(bytes) + " bytes");
  }
}

MPI_Op op_of(Op op) { return std::array{MPI_SUM, MPI_PROD, MPI_MIN, MPI_MAX}[static_cast<size_t>(op)]; }

}  // namespace tessera::comm::mpi
