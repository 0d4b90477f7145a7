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
  int wait_status = 0;          ///< of waitpid
  std::string report;           ///< contents of its TESSERA_ERROR_FILE, ours or torch's
  std::string last_lines = {};  ///< that it wrote, where its output was captured

  bool operator==(const Ending&) const = default;
  bool failed() const;
  /// What the ranks that lost a peer see: a broken connection.
  bool is_consequence() const;
};

/// What a worker left: one line, and of which kind it is.
struct Report {
  Failure kind = Failure::Other;
  std::string reason;
};
std::string write_report(const Report& report);
/// Reads what write_report wrote, or the JSON of torch.distributed.elastic's @record.
std::optional<Report> read_report(const std::string& contents);

struct JobEnd {
  int exit_code = 0;
  std::string sentence;      ///< empty where nothing failed
  int rank = -1;             ///< that failed
  bool consequence = false;  ///< the cause was not seen: all that is known is a broken connection
};

/// The cause among `endings` is the first of the likeliest kind: killed by a signal (other than SIGABRT, by which an uncaught CommError also ends), bad input
/// (exit 2), any other failure, and last a broken connection, for that is what the ranks that lost a peer see. Of two of a kind, it is the one whose sentence
/// the other repeats.
JobEnd judge(const std::vector<Ending>& endings);

/// "SIGSEGV (segmentation fault)".
std::string describe_signal(int signal);

}  // namespace tessera::launch
