// MPI_Allreduce alone, in place on fp32, timed as tessera times its own: what the MPI library gives without us.
//   mpirun -n 2 tessera_peer_mpi --bytes 4096,1048576 --seconds 0.5
#include <mpi.h>

#include "bench/peers/arguments.h"

namespace {

using tessera::bench::Ranks;

int64_t checked_sum(std::vector<float>& buffer, int rank, int ranks) {
  for (size_t i = 0; i < buffer.size(); ++i) buffer[i] = static_cast<float>(rank + i % 5);
  MPI_Allreduce(MPI_IN_PLACE, buffer.data(), static_cast<int>(buffer.size()), MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
  int64_t wrong = 0;
  for (size_t i = 0; i < buffer.size(); ++i) wrong += buffer[i] != static_cast<float>(ranks * (ranks - 1) / 2 + ranks * static_cast<int>(i % 5));
  buffer.assign(buffer.size(), 0.0f);
  return wrong;
}

}  // namespace

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  const auto arguments = peer::read_arguments(argc, argv);
  int rank = 0, size = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  const Ranks ranks{.barrier = [] { MPI_Barrier(MPI_COMM_WORLD); },
                    .slowest =
                        [](const std::vector<double>& mine) {
                          auto numbers = mine;
                          MPI_Allreduce(MPI_IN_PLACE, numbers.data(), static_cast<int>(numbers.size()), MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
                          return numbers;
                        }};
  for (const int64_t bytes : arguments.bytes) {
    std::vector<float> buffer(static_cast<size_t>(bytes) / sizeof(float));
    if (checked_sum(buffer, rank, size) != 0) {
      std::fprintf(stderr, "MPI_Allreduce of %lld bytes: wrong sum on rank %d\n", static_cast<long long>(bytes), rank);
      MPI_Abort(MPI_COMM_WORLD, 1);
    }
    const auto call = [&] { MPI_Allreduce(MPI_IN_PLACE, buffer.data(), static_cast<int>(buffer.size()), MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD); };
    const auto timing = measure(ranks, call, arguments.limits);
    if (rank == 0) peer::print_row("all_reduce", "openmpi", bytes, size, timing);
  }
  MPI_Finalize();
  return 0;
}
