#include "tessera/plan/settings.h"

#include <algorithm>
#include <filesystem>

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <nlohmann/json.hpp>

#include "tessera/core/json_text.h"

namespace tessera::plan {

namespace {

/// TOML is UTF-8, and a path that a configuration names, or the folder that it lies in, need not be; no dry run opens what a run would write there.
std::string utf8_text(const std::string& text) { return nlohmann::json::parse(json_text(nlohmann::json(text))).get<std::string>(); }

}  // namespace

Config with_settings(const Config& config, const std::vector<std::string>& sets) {
  Config settled = config;
  settled.asked.clear();  // what it became is kept: settled anew, it would be by what meta stands for here
  Config changed = parse_config(utf8_text(to_toml(settled)), std::filesystem::current_path(), sets);
  changed.name = config.name;
  for (const auto& asked : config.asked) {
    if (std::ranges::none_of(sets, [&](const std::string& set) { return set.starts_with(asked.first + "="); })) changed.asked.insert(asked);
  }
  resolve(changed);
  return changed;
}

std::string flags_of(const std::vector<std::string>& sets) {
  std::string out;
  for (const auto& set : sets) {
    const bool is_plain = set.find_first_of("\"[]{}()*?$ ") == std::string::npos;  // to a shell
    out += (out.empty() ? "--set " : " --set ") + (is_plain ? set : "'" + set + "'");
  }
  return out;
}

std::string terms_of_a_micro_batch(const Config& config) {
  if (config.model.experts == 0) return "";
  std::vector<std::string> keys;
  if (config.moe.balance_loss != 0) keys.emplace_back("moe.balance_loss");
  if (config.moe.z_loss != 0) keys.emplace_back("moe.z_loss");
  if (config.moe.capacity_factor != 0) keys.emplace_back("moe.capacity_factor");
  if (config.model.router == "expert_choice") keys.emplace_back("model.router = expert_choice");
  return fmt::format("{}", fmt::join(keys, ", "));
}

}  // namespace tessera::plan
