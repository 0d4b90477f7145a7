#include "tessera/config/optim_groups.h"

#include <algorithm>
#include <cmath>
#include <map>

#include "tessera/config/detail.h"
#include "tessera/core/error.h"
#include "tessera/core/format.h"

// A group's keys are those of the section, and are read as --set reads them: so types, choices and their refusals are the section's own.

namespace tessera {
namespace {

const std::vector<std::string>& group_keys() {
  static const std::vector<std::string> keys{"lr", "lr_factor", "weight_decay", "name", "betas", "eps", "momentum"};
  return keys;
}

std::string named(const std::string& text) { return detail::concat("optim.groups, ", detail::quoted(text)); }

/// The parts of `text` between commas that stand in no brackets.
std::vector<std::string> split_at_commas(const std::string& text) {
  std::vector<std::string> parts{""};
  int depth = 0;
  for (const char c : text) {
    depth += c == '[' ? 1 : c == ']' ? -1 : 0;
    if (c == ',' && depth == 0) {
      parts.emplace_back();
    } else {
      parts.back() += c;
    }
  }
  return parts;
}

void set(OptimGroup& group, const OptimConfig& section, const std::string& place, const std::string& key, const std::string& value) {
  require(std::ranges::find(group_keys(), key) != group_keys().end(), place, ": a group has no key '", key, "'; the nearest is ", nearest(key, group_keys()),
          "; there are lr, lr_factor, weight_decay, name, betas, eps, momentum");
  require(group.given.insert(key).second, place, ": ", key, " is set twice; set it once");
  if (key != "lr" && key != "lr_factor") {
    Config config;
    config.optim = group.settings;
    detail::set_from_text(config, "optim", key, value, place);
    group.settings = config.optim;
    return;
  }
  require(group.given.contains("lr") != group.given.contains("lr_factor"), place, ": lr and lr_factor say the same in two ways; set one of them");
  Config config;
  detail::set_from_text(config, "optim", "lr", value, place);
  const double number = config.optim.lr;
  require(number > 0, place, ": ", key, " = ", value,
          ": expected a positive number, if a small one; parameters that are not to move at all are frozen in C++, by requires_grad_(false)");
  if (key == "lr") require(section.lr > 0, place, ": lr = ", value, ": is held against optim.lr, whose schedule it follows; set optim.lr, or lr_factor");
  group.lr_factor = key == "lr" ? number / section.lr : number;
  group.settings.lr = key == "lr" ? number : section.lr * number;
  group.settings.min_lr = section.min_lr * group.lr_factor;
}

OptimGroup parse_group(const OptimConfig& section, const std::string& text) {
  const std::string place = named(text);
  const auto colon = text.find(':');
  require(colon != std::string::npos, place, ": expected 'pattern: key = value, ...', such as \"**.*norm: weight_decay = 0\"");
  OptimGroup group{.pattern = detail::trimmed(text.substr(0, colon)), .settings = section};
  group.settings.groups.clear();
  require(!group.pattern.empty(), place, ": there is no pattern before the colon; name modules or parameters, such as \"embed_tokens: lr_factor = 0.1\"");
  for (const auto& setting : split_at_commas(text.substr(colon + 1))) {
    const auto equals = setting.find('=');
    require(equals != std::string::npos, place, ": '", detail::trimmed(setting),
            "' is no 'key = value'; set at least one of lr, lr_factor, weight_decay, name, ", "betas, eps, momentum");
    set(group, section, place, detail::trimmed(setting.substr(0, equals)), detail::trimmed(setting.substr(equals + 1)));
  }
  const std::string& name = group.settings.name;
  for (const auto& key : group.given) {
    const auto& users = optimizers_that_use(key);
    require(users.empty() || users.contains(name), place, ": ", key, " has no effect with name = ", name, "; leave it out");
  }
  if (name != section.name && !group.given.contains("momentum")) group.settings.momentum = default_momentum(name);
  return group;
}

}  // namespace

std::vector<OptimGroup> optim_groups(const OptimConfig& config) {
  std::vector<OptimGroup> groups;
  for (const auto& text : config.groups) groups.push_back(parse_group(config, text));
  return groups;
}

bool uses_optimizer(const OptimConfig& config, const std::set<std::string>& names) { return !setting_of_optimizer(config, names).empty(); }

std::string setting_of_optimizer(const OptimConfig& config, const std::set<std::string>& names) {
  if (names.contains(config.name)) return "optim.name = " + config.name;
  const auto groups = optim_groups(config);
  const auto group = std::ranges::find_if(groups, [&](const OptimGroup& each) { return names.contains(each.settings.name); });
  return group == groups.end() ? "" : "optim.groups = " + group->pattern + ": name = " + group->settings.name;
}

const std::set<std::string>& optimizers_that_use(const std::string& key) {
  static const std::map<std::string, std::set<std::string>> users{{"momentum", {"sgd", "adafactor", "muon"}},
                                                                  {"betas", {"adamw", "adam8bit", "lion", "muon"}},
                                                                  {"eps", {"adamw", "adam8bit", "adafactor", "muon"}},
                                                                  {"ns_steps", {"muon"}},
                                                                  {"split_heads", {"muon"}}};
  static const std::set<std::string> all;
  const auto found = users.find(key);
  return found == users.end() ? all : found->second;
}

double default_momentum(const std::string& name) { return name == "muon" ? 0.95 : 0; }

double momentum_of(const OptimConfig& optim) { return optim.momentum.value_or(default_momentum(optim.name)); }

namespace {

/// Of one optimizer.
void check_ranges(const OptimConfig& optim) {
  for (const double beta : optim.betas) {
    require(beta >= 0 && beta < 1, "optim.betas = [", format_float(optim.betas[0]), ", ", format_float(optim.betas[1]),
            "]: expected two numbers from 0 to below 1");
  }
  require(optim.eps > 0, "optim.eps = ", optim.eps, ": expected a positive number, such as 1e-8");
  const double momentum = momentum_of(optim);
  require(momentum >= 0 && momentum < 1, "optim.momentum = ", momentum, ": expected a number from 0 to below 1");
  require(optim.weight_decay >= 0, "optim.weight_decay = ", optim.weight_decay, ": expected 0 or more");
  require(optim.ns_steps >= 1 && optim.ns_steps <= 20, "optim.ns_steps = ", optim.ns_steps, ": expected 1 to 20 steps; 5 is the papers'");
}

/// Of the section, and of each of its groups.
template <class Check>
void check_each(const OptimConfig& optim, Check&& check) {
  check(optim);
  const auto groups = optim_groups(optim);
  for (size_t i = 0; i < groups.size(); ++i) {
    try {
      check(groups[i].settings);
    } catch (const ConfigError& error) {
      throw ConfigError(detail::concat(named(optim.groups[i]), ": ", error.what()));
    }
  }
}

}  // namespace

void check_optimizers(const OptimConfig& config) { check_each(config, check_ranges); }

void detail::validate_optim(const OptimConfig& config, int64_t steps) {
  check_each(config, [steps](const OptimConfig& optim) {
    require(optim.lr > 0, "optim.lr = ", optim.lr, ": expected a positive learning rate; set optim.lr, such as 3e-4");
    check_ranges(optim);
    require(optim.weight_decay * optim.lr <= 1, "optim.weight_decay = ", format_float(optim.weight_decay), ": times optim.lr = ", format_float(optim.lr),
            " a step would take more of a weight away than there is; set a weight_decay of at most ", format_float(1 / optim.lr));
    require(optim.max_grad_norm >= 0, "optim.max_grad_norm = ", optim.max_grad_norm, ": expected a positive norm, or 0 for no clipping");
    require(optim.warmup_steps >= 0 && optim.warmup_steps <= steps, "optim.warmup_steps = ", optim.warmup_steps, ": expected 0 to run.steps = ", steps,
            "; set optim.warmup_steps to less, or run.steps to more");
    require(optim.min_lr >= 0 && optim.min_lr <= optim.lr, "optim.min_lr = ", optim.min_lr, ": expected 0 to optim.lr = ", optim.lr);
    require(optim.state_dtype == "fp32" || optim.name == "adamw" || optim.name == "lion" || optim.name == "sgd", "optim.state_dtype = ", optim.state_dtype,
            ": optim.name = ", optim.name, " has no update with stochastic rounding; set optim.state_dtype = fp32, or optim.name = adamw, lion or sgd");
  });
}

}  // namespace tessera
