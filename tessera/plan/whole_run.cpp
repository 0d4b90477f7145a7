#include "tessera/plan/whole_run.h"

#include <cmath>
#include <cstdlib>
#include <string_view>

#include <fmt/format.h>

#include "tessera/core/error.h"
#include "tessera/core/format.h"

namespace tessera::plan {

namespace {

/// Powers of 1000 as of any unit of energy: the thousand million of a count is a B.
std::string format_energy(double watt_hours) {
  constexpr std::string_view prefixes = "kMGTP";
  size_t power = 0;
  while (power + 1 < prefixes.size() && watt_hours >= 999.5e3) watt_hours /= 1000, ++power;
  return fmt::format("{:.3g} {}Wh", watt_hours / 1000, prefixes[power]);
}

}  // namespace

WholeRun whole_run(const DryRun& step, int64_t steps, std::optional<double> watts_a_device) {
  WholeRun run{.tokens = static_cast<double>(steps) * static_cast<double>(step.tokens_per_step), .steps = steps};
  if (!step.time) return run;
  run.seconds = static_cast<double>(steps) * step.time->seconds;
  run.device_hours = *run.seconds / 3600 * step.world;
  if (watts_a_device) run.kilowatt_hours = *run.device_hours * *watts_a_device / 1000;
  return run;
}

int64_t steps_for(const DryRun& step, double tokens) { return static_cast<int64_t>(std::ceil(tokens / static_cast<double>(step.tokens_per_step))); }

double parse_tokens(const std::string& text) {
  char* end = nullptr;
  double number = std::strtod(text.c_str(), &end);
  const std::string_view unit = end;
  constexpr std::string_view units = "KMBT";
  const bool starts_well = !text.empty() && (text.front() == '.' || (text.front() >= '0' && text.front() <= '9'));
  const auto power = unit.size() == 1 ? units.find(unit.front()) : std::string_view::npos;
  if (power != std::string_view::npos) number *= std::pow(1000.0, static_cast<double>(power + 1));
  require(starts_well && (unit.empty() || power != std::string_view::npos) && number >= 1 && number <= 1e18, "--tokens = ", text,
          ": expected 1 to 1e18 tokens, such as 15T, 300B or 1.4e12");
  return number;
}

nlohmann::json to_json(const WholeRun& run) {
  nlohmann::json json = {{"tokens", run.tokens}, {"steps", run.steps}};
  if (run.seconds) json["seconds"] = *run.seconds;
  if (run.device_hours) json["device_hours"] = *run.device_hours;
  if (run.kilowatt_hours) json["kilowatt_hours"] = *run.kilowatt_hours;
  return json;
}

std::string to_string(const WholeRun& run) {
  std::string out = fmt::format("the whole run: {} tokens in {} step{}", format_count(run.tokens), run.steps, run.steps == 1 ? "" : "s");
  if (run.seconds) {
    constexpr double day = 86400;
    out += fmt::format(": {}, {} device hours", *run.seconds < 2 * day ? format_duration(*run.seconds) : fmt::format("{:.1f} days", *run.seconds / day),
                       *run.device_hours < 100 ? fmt::format("{:.3g}", *run.device_hours) : format_count(*run.device_hours));
  }
  if (run.kilowatt_hours) out += fmt::format(", {}", format_energy(*run.kilowatt_hours * 1000));
  return out + "\n";
}

}  // namespace tessera::plan
