#pragma once

#include <filesystem>
#include <string>

namespace tessera::launch {

/// What the flight records of a job say of its end.
struct RecordFindings {
  std::string sentence;  ///< one line; empty where there are no records
  std::string table;     ///< one line a rank under a line of titles, each with its newline; empty where there are no records
  bool names_cause =
      false;  ///< the sentence says who kept whom waiting, or who disagreed, of ranks whose records are here: it explains more than a rank's own error
};

/// Reads the flight records (docs/formats.md) that the ranks left in `dir` and explains them. For a launcher whose job failed: never throws. A folder
/// that does not exist or holds no record gives empty findings; a record that cannot be read is left out, and the sentence says so.
/// Takes about 10 ms a rank.
RecordFindings explain_records(const std::filesystem::path& dir) noexcept;

}  // namespace tessera::launch
