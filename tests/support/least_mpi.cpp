// An MPI whose tags end where the standard lets them end, by MPI's own profiling interface: preloaded by the ranks of a test (tests/comm/mpirun.h).
#include <mpi.h>

namespace {
int most_tag = 32767;
}

extern "C" {

int MPI_Comm_get_attr(MPI_Comm communicator, int key, void* value, int* given) {
  const int code = PMPI_Comm_get_attr(communicator, key, value, given);
  if (code == MPI_SUCCESS && key == MPI_TAG_UB && *given) *static_cast<int**>(value) = &most_tag;
  return code;
}

int MPI_Isend(const void* data, int count, MPI_Datatype type, int to, int tag, MPI_Comm communicator, MPI_Request* request) {
  return tag > most_tag ? MPI_ERR_TAG : PMPI_Isend(data, count, type, to, tag, communicator, request);
}

int MPI_Irecv(void* data, int count, MPI_Datatype type, int from, int tag, MPI_Comm communicator, MPI_Request* request) {
  return tag > most_tag ? MPI_ERR_TAG : PMPI_Irecv(data, count, type, from, tag, communicator, request);
}
}
