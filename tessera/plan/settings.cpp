#include "tessera/plan/settings.h"

#include <filesystem>

namespace tessera::plan {

Config with_settings(const Config& config, const std::vector<std::string>& sets) {
  Config changed = parse_config(to_toml(config), std::filesystem::current_path(), sets);
  changed.name = config.name;
  resolve(changed);
  return changed;
}

std::string flags_of(const std::vector<std::string>& sets) {
  std::string out;
  for (const auto& set : sets) out += (out.empty() ? "--set " : " --set ") + set;
  return out;
}

}  // namespace tessera::plan
