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

/// Carries what the workers of one attempt write. One thread; a line costs three system calls more than without it. A file that takes no more, on a full disk,
/// is named once in a warning, and the console still gets everything; so is a console that takes nothing, and the job goes on.
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

  /// The job is being ended: a console that takes nothing for some seconds does not hold that up, and what it had not taken is lost, which a warning says.
  void hurry();

  /// The last lines that `rank` wrote to standard error, or else to standard output, as far as they were captured.
  std::string last_lines(int rank);

 private:
  struct Stream;
  void carry();
  /// Who is in the midst of a line, by console: lines of several ranks must not mix.
  using Speakers = std::array<const Stream*, 3>;
  static bool drain(Stream& stream, bool all);
  void show_the_rest();

  std::mutex mutex_;
  Speakers speakers_{};
  std::vector<std::unique_ptr<Stream>> streams_;
  std::atomic<bool> ending_ = false, hurried_ = false;
  Wake wake_;
  std::thread thread_;
};

}  // namespace tessera::launch
