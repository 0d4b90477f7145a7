#pragma once

#include <optional>
#include <string>

#include "cli/command_line.h"
#include "tessera/plan/html_report.h"

namespace tessera::cli {

/// Files that a plan is drawn into.
struct PlanPictures {
  std::string report{}, trace{};

  void add_options(Command& command);
  bool asked() const { return !report.empty() || !trace.empty(); }
  /// Before anything is computed for them. Throws ConfigError for a file that cannot be written; `input` is what the plan is read from.
  void check(const std::string& input, bool has_device) const;
  void write(const plan::Reported& reported) const;
};

}  // namespace tessera::cli
