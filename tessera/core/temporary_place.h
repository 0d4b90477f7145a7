#pragma once

#include <filesystem>
#include <string>

namespace tessera {

/// Where files go that nobody keeps, and what said so.
struct TemporaryPlace {
  std::string knob;  ///< for messages: "TMPDIR = /scratch"
  std::filesystem::path folder;

  /// Throws ConfigError naming the knob, why nothing can be made there, and `way_out` beside another TMPDIR.
  [[noreturn]] void refuse(const std::string& why, const std::string& way_out) const;
};

/// As TMPDIR says, or one of its like (TMP, TEMP, TEMPDIR), else /tmp. Whether there is such a folder is not looked at.
TemporaryPlace temporary_place();

}  // namespace tessera
