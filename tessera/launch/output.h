#pragma once

#include <array>
#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "tessera/launch/signals.h"

/// Where the workers' output goes. Not part of the public surface.
namespace tessera::launch {

/// One of a worker's two streams.
struct StreamPlan {
  bool captured = false;  ///< through a pipe to us; otherwise the worker inherits our own stream, and the rest says nothing
  bool console = true;    ///< copied to our own stream
  std::string prefix{};   ///< before each line on the console; with one, lines stay whole among those of other ranks
  std::string file{};     ///< where a copy is kept; empty: nowhere

  bool operator==(const StreamPlan&) const = default;
};

/// A worker's standard output and standard error.
struct OutputPlan {
  StreamPlan out{}, err{};

  bool operator==(const OutputPlan&) const = default;
};

/// Carries what the workers of one attempt write. One thread; a line costs two system calls more than without it. A file that takes no more, on a full disk, is
/// named once in a warning, and the console still gets everything.
class Output {
 public:
  Output();
  /// Hands on what is left in the pipes. What a process that outlives its worker writes later is lost.
  ~Output();
  Output(const Output&) = delete;
  Output& operator=(const Output&) = delete;

  /// The worker's ends of its streams, to be given to it and then closed; -1 where it inherits ours.
  /// Throws ConfigError where a file cannot be written.
  std::array<int, 2> open(int rank, const OutputPlan& plan);

  /// The last lines that `rank` wrote to standard error, or else to standard output, as far as they were captured.
  std::string last_lines(int rank);

 private:
  struct Stream;
  void carry();
  static bool drain(Stream& stream);

  std::mutex mutex_;
  std::vector<std::unique_ptr<Stream>> streams_;
  std::atomic<bool> ending_ = false;
  Wake wake_;
  std::thread thread_;
};

}  // namespace tessera::launch
