#pragma once

#include <optional>
#include <string>
#include <vector>

#include "tessera/launch/local.h"

/// Which rank's end explains a failed launch: pure functions of how the workers ended. Not part of the public surface.
namespace tessera::launch {

/// How one worker ended, in the order in which that was seen.
struct Ending {
  int rank = 0;
  int wait_status = 0;  ///< of waitpid
  std::string report;   ///< contents of its TESSERA_ERROR_FILE
  bool failed() const;
};

/// What a worker left: one line, and of which kind it is.
struct Report {
  Failure kind = Failure::Other;
  std::string reason;
};
std::string write_report(const Report& report);
std::optional<Report> read_report(const std::string& contents);

struct Verdict {
  int exit_code = 0;
  std::string sentence;  ///< empty where nothing failed
};

/// The cause among `endings` is the first of the likeliest kind: killed by a signal (other than SIGABRT, by which an uncaught CommError also ends), bad input
/// (exit 2), any other failure, and last a broken connection, for that is what the ranks that lost a peer see.
Verdict judge(const std::vector<Ending>& endings);

/// "SIGSEGV (segmentation fault)".
std::string describe_signal(int signal);

}  // namespace tessera::launch
