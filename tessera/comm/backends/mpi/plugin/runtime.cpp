#include "tessera/comm/backends/mpi/plugin/runtime.h"

#include <chrono>
#include <stdexcept>
#include <thread>
#include <utility>

#include "tessera/core/error.h"

// MPI_Finalize waits for all processes without limit, also for one that has died. So a non-blocking barrier goes first, with a deadline: who finds that the
// others do not come leaves without it, and mpirun says that the job ended improperly, which is so.

namespace tessera::comm::mpi {

void check(int code, const char* function) {
  if (code == MPI_SUCCESS) return;
  char text[MPI_MAX_ERROR_STRING] = "";
  int length = 0;
  MPI_Error_string(code, text, &length);
  throw std::runtime_error(detail::concat(function, ": ", text));
}

void Runtime::start(const Environment& environment) {
  if (runs_) return;
  int ended = 0;
  MPI_Finalized(&ended);
  if (ended) throw CommError("comm.backend = mpi: MPI has ended in this process already, and cannot be started twice");
  int level = MPI_THREAD_SINGLE;
  check(MPI_Init_thread(nullptr, nullptr, MPI_THREAD_MULTIPLE, &level), "MPI_Init_thread");
  several_threads_ = level == MPI_THREAD_MULTIPLE;
  runs_ = true;
  void* most = nullptr;
  int given = 0;
  check(MPI_Comm_get_attr(MPI_COMM_WORLD, MPI_TAG_UB, &most, &given), "MPI_Comm_get_attr");
  if (given) most_tag_ = *static_cast<int*>(most);
  int rank = 0, size = 0;
  check(MPI_Comm_rank(MPI_COMM_WORLD, &rank), "MPI_Comm_rank");
  check(MPI_Comm_size(MPI_COMM_WORLD, &size), "MPI_Comm_size");
  check(MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
  if (rank == environment.rank && size == environment.size) return;
  give_up();
  throw ConfigError(detail::concat("comm.backend = mpi: to MPI this is rank ", rank, " of ", size, ", to the launcher's variables rank ", environment.rank,
                                   " of ", environment.size, "; start every rank with mpirun -n ", environment.size, ", or set comm.backend = auto"));
}

void Runtime::finish() {
  runs_ = false;
  check(MPI_Finalize(), "MPI_Finalize");
}

void Runtime::end() {
  if (std::exchange(runs_, false) && !broken_ && others_finish_too()) MPI_Finalize();
}

Runtime::~Runtime() { end(); }

bool Runtime::others_finish_too() {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(5);
  MPI_Request all = MPI_REQUEST_NULL;
  if (MPI_Ibarrier(MPI_COMM_WORLD, &all) != MPI_SUCCESS) return false;
  for (int done = 0; !done; std::this_thread::sleep_for(std::chrono::milliseconds(1))) {
    if (MPI_Test(&all, &done, MPI_STATUS_IGNORE) != MPI_SUCCESS || std::chrono::steady_clock::now() > deadline) return false;
  }
  return true;
}

std::string Runtime::broadcast(std::string text) const {
  int size = static_cast<int>(text.size());
  check(MPI_Bcast(&size, 1, MPI_INT, 0, MPI_COMM_WORLD), "MPI_Bcast");
  text.resize(size);
  check(MPI_Bcast(text.data(), size, MPI_CHAR, 0, MPI_COMM_WORLD), "MPI_Bcast");
  return text;
}

}  // namespace tessera::comm::mpi
