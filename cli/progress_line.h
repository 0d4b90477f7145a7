#pragma once

#include <condition_variable>
#include <mutex>
#include <stop_token>
#include <string>
#include <thread>

#include <unistd.h>

namespace tessera::cli {

/// One line on standard error, written again and again on a terminal, and every ten seconds elsewhere; nothing of a plan that is done at once. By a thread of
/// its own: a large model takes its time before the dry run has anything to tell.
class ProgressLine {
 public:
  ProgressLine();
  ~ProgressLine();
  void say(std::string text);

 private:
  void show(const std::stop_token& stop);

  bool terminal_ = isatty(STDERR_FILENO) != 0;
  bool shown_ = false;
  std::mutex mutex_;
  std::condition_variable_any ended_;
  std::string text_ = "laying out the model";
  std::jthread thread_;  // last: it reads the others
};

}  // namespace tessera::cli
