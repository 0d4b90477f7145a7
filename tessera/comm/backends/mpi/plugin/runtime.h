#pragma once

#include <atomic>
#include <mutex>
#include <string>

#include <mpi.h>

#include "tessera/comm/world.h"

namespace tessera::comm::mpi {

/// Throws std::runtime_error with MPI's own text unless the code is MPI_SUCCESS.
void check(int code, const char* function);

/// MPI in this process: started once, ended once.
///
/// The end waits for all ranks, so a rank that failed must not come there: it is skipped where anything went wrong, and where the others do not come to it
/// within seconds. mpirun then ends what is left.
class Runtime {
 public:
  Runtime() = default;
  ~Runtime();
  Runtime(const Runtime&) = delete;
  Runtime& operator=(const Runtime&) = delete;

  /// Starts MPI unless it runs. Throws ConfigError where its rank and size are not the environment's, CommError where it has ended.
  void start(const Environment& environment);
  /// Ends it, with all ranks.
  void finish();
  /// What the destructor does, for a program that ends without destructors.
  void end();

  /// Rank 0's text on every rank.
  std::string broadcast(std::string text) const;

  /// The largest tag of a message that this MPI takes: 32767 at least, which the standard promises.
  int most_tag() const { return most_tag_; }

  /// Held around every call of MPI where the library is not safe for several threads; else a lock of nothing.
  std::unique_lock<std::mutex> lock() { return several_threads_ ? std::unique_lock<std::mutex>() : std::unique_lock(mutex_); }

  /// Something is left unfinished that will never finish.
  void give_up() { broken_ = true; }

 private:
  bool others_finish_too();

  std::mutex mutex_;
  bool several_threads_ = false;
  bool runs_ = false;
  int most_tag_ = 32767;
  std::atomic<bool> broken_ = false;
};

}  // namespace tessera::comm::mpi
