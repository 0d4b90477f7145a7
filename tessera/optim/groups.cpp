#include "tessera/optim/groups.h"

#include <algorithm>
#include <map>
#include <set>

#include "tessera/config/patterns.h"
#include "tessera/core/error.h"

namespace tessera::optim {

namespace {

/// Settings but for those in which the groups of one optimizer may differ, and those that are not an optimizer's to know.
OptimConfig kind_of(OptimConfig settings) {
  const OptimConfig none;
  settings.lr = settings.min_lr = settings.weight_decay = 0;
  settings.momentum = momentum_of(settings);  // given or not
  settings.decay_on = none.decay_on;
  settings.groups.clear();
  return settings;
}

OptimizerShare& share_of(std::vector<OptimizerShare>& shares, const OptimConfig& settings, const WholeModel& model) {
  const auto found = std::ranges::find_if(shares, [&](const OptimizerShare& share) { return kind_of(share.settings) == kind_of(settings); });
  if (found != shares.end()) return *found;
  OptimizerShare& share = shares.emplace_back(OptimizerShare{settings, {}, model});
  share.model.parameters.clear();
  return share;
}

ParameterGroup& group_of(std::vector<ParameterGroup>& groups, double weight_decay, double lr_factor) {
  const auto found =
      std::ranges::find_if(groups, [&](const ParameterGroup& group) { return group.weight_decay == weight_decay && group.lr_factor == lr_factor; });
  return found != groups.end() ? *found : groups.emplace_back(ParameterGroup{{}, weight_decay, lr_factor});
}

}  // namespace

bool is_of(const OptimGroup& group, const std::string& name) { return named_by(group.pattern, name).has_value(); }

namespace {

auto first_of(const std::vector<OptimGroup>& groups, const std::string& name) {
  return std::ranges::find_if(groups, [&](const OptimGroup& group) { return is_of(group, name); });
}

}  // namespace

ParameterSettings settings_of(const OptimConfig& config, const std::vector<OptimGroup>& groups, const std::string& name, size_t dims, const WholeModel& model) {
  require(config.decay_on == "all" || config.decay_on == "matrices", "optim.decay_on = ", config.decay_on, ": must be one of all, matrices");
  const auto group = first_of(groups, name);
  const bool grouped = group != groups.end();
  ParameterSettings own{grouped ? group->settings : config, grouped ? group->lr_factor : 1};
  const bool says_decay = grouped && group->given.contains("weight_decay");
  if (config.decay_on == "matrices" && dims < 2 && !says_decay) own.settings.weight_decay = 0;
  if (own.settings.name == "muon" && (dims != 2 || model.looked_up.contains(name) || model.heads.contains(name))) {
    own.settings.name = "adamw";
    own.settings.momentum = default_momentum("adamw");
  }
  return own;
}

std::vector<OptimizerShare> deal_groups(const OptimConfig& config, const std::vector<nn::NamedParameter>& parameters, const WholeModel& model) {
  const auto groups = optim_groups(config);
  std::vector<OptimizerShare> shares;
  for (const Slice& whole : model.parameters) {
    share_of(shares, settings_of(config, groups, whole.name, whole.shape.size(), model).settings, model).model.parameters.push_back(whole);
  }
  for (const auto& parameter : parameters) {
    const auto own = settings_of(config, groups, parameter.name, nn::slice_of(parameter.tensor).shape.size(), model);
    OptimizerShare& share = share_of(shares, own.settings, model);
    group_of(share.groups, own.settings.weight_decay, own.lr_factor).parameters.push_back(parameter);
  }
  return shares;
}

std::vector<ParameterGroup> decay_groups(const std::vector<nn::NamedParameter>& parameters, const std::string& decay_on, double weight_decay) {
  OptimConfig config;
  config.decay_on = decay_on;
  config.weight_decay = weight_decay;
  auto shares = deal_groups(config, parameters, {});
  return shares.empty() ? std::vector<ParameterGroup>() : std::move(shares.front().groups);
}

void check_groups(const OptimConfig& config, const std::vector<nn::NamedParameter>& parameters, const WholeModel& model) {
  const auto groups = optim_groups(config);
  if (groups.empty()) return;
  std::vector<std::string> names;
  std::map<std::string, std::string> tied;  // to the name that counts
  for (const Slice& whole : model.parameters) names.push_back(whole.name);
  for (const auto& parameter : parameters) {
    if (model.parameters.empty()) names.push_back(parameter.name);
    for (const auto& alias : parameter.aliases) tied.emplace(alias, parameter.name);
  }
  std::vector<size_t> matched(groups.size()), taken(groups.size());
  std::set<std::string> known;
  for (const auto& name : names) {
    for (auto& path : paths_to(name)) known.insert(std::move(path));
    bool first = true;
    for (size_t i = 0; i < groups.size(); ++i) {
      if (!is_of(groups[i], name)) continue;
      ++matched[i];
      if (std::exchange(first, false)) ++taken[i];
    }
  }
  for (size_t i = 0; i < groups.size(); ++i) {
    const std::string place = detail::concat("optim.groups, \"", config.groups[i], "\": '", groups[i].pattern, "' ");
    const auto other = std::ranges::find_if(tied, [&](const auto& each) { return is_of(groups[i], each.first); });
    require(matched[i] > 0 || other == tied.end(), place, "matches '", other == tied.end() ? "" : other->first, "' alone, which is tied to '",
            other == tied.end() ? "" : other->second, "', the one weight's first name; name that");
    require(matched[i] > 0, place, "matches no module and no parameter; the nearest path is '",
            nearest(groups[i].pattern, std::vector<std::string>(known.begin(), known.end())), "' ('*' is any text between two dots, '**' any number of parts)");
    require(taken[i] > 0, place, "matches only parameters of groups before it, and the first that matches counts; put it before them");
  }
}

std::vector<std::string> groups_without_effect(const OptimConfig& config, const std::vector<nn::NamedParameter>& parameters) {
  const auto groups = optim_groups(config);
  std::set<std::string> trained;
  for (const auto& parameter : parameters) {
    const auto group = first_of(groups, parameter.name);
    if (group != groups.end() && parameter.tensor.requires_grad()) trained.insert(group->pattern);
  }
  std::vector<std::string> idle;
  for (size_t i = 0; i < groups.size(); ++i) {
    if (!trained.contains(groups[i].pattern))
      idle.push_back(detail::concat("optim.groups, \"", config.groups[i], "\": has no effect, as all that it is of is frozen; name what is trained, such as ",
                                    "**.lora_b, or train it (lora.trained)"));
  }
  return idle;
}

}  // namespace tessera::optim
