#pragma once

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "cli/command_line.h"
#include "tessera/plan/html_report.h"

namespace tessera::cli {

/// Files that a plan is drawn into.
struct PlanPictures {
  std::string report{}, trace{};

  void add_options(Command& command);
  bool asked() const { return !report.empty() || !trace.empty(); }
  /// The flags, each with its file.
  std::vector<std::pair<const char*, std::string>> files() const { return {{"--report", report}, {"--trace", trace}}; }
  /// Before anything is computed for them. Throws ConfigError.
  void check(bool has_device) const;
  void write(const plan::Reported& reported) const;
};

}  // namespace tessera::cli
