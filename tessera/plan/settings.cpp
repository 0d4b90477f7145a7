#include "tessera/plan/settings.h"

#include <filesystem>

#include <nlohmann/json.hpp>

#include "tessera/core/json_text.h"

namespace tessera::plan {

namespace {

/// TOML is UTF-8, and a path that a configuration names, or the folder that it lies in, need not be; no dry run opens what a run would write there.
std::string utf8_text(const std::string& text) { return nlohmann::json::parse(json_text(nlohmann::json(text))).get<std::string>(); }

}  // namespace

Config with_settings(const Config& config, const std::vector<std::string>& sets) {
  Config changed = parse_config(utf8_text(to_toml(config)), std::filesystem::current_path(), sets);
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
