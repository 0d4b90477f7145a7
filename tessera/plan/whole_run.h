#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include <nlohmann/json.hpp>

#include "tessera/plan/dry_run.h"

namespace tessera::plan {

/// What all steps of a run take together.
struct WholeRun {
  double tokens = 0;
  int64_t steps = 0;
  std::optional<double> seconds{}, device_hours{};  ///< where a step's time is known
  std::optional<double> kilowatt_hours{};           ///< where the device's power is, too: all devices at that all the time
};

/// So many steps as the one that was run dry, of which nobody waits for data or checkpoints.
WholeRun whole_run(const DryRun& step, int64_t steps, std::optional<double> watts_a_device);

/// The fewest that see so many tokens.
int64_t steps_for(const DryRun& step, double tokens);

/// "15T", "300B", "1.4e12", "5000": a number of tokens. Throws ConfigError naming --tokens.
double parse_tokens(const std::string& text);

nlohmann::json to_json(const WholeRun& run);

/// One line.
std::string to_string(const WholeRun& run);

}  // namespace tessera::plan
