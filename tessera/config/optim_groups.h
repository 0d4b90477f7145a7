#pragma once

#include <set>
#include <string>
#include <vector>

#include "tessera/config/config.h"

namespace tessera {

/// One of `optim.groups`: "pattern: key = value, ...".
struct OptimGroup {
  std::string pattern;
  OptimConfig settings;         ///< those of the section, with the group's in their place; no groups
  double lr_factor = 1;         ///< its learning rate over that of the section, at every step of the schedule
  std::set<std::string> given;  ///< keys that the group sets
};

/// Reads `optim.groups`. Keys: lr, or lr_factor of optim.lr; weight_decay, name, betas, eps, momentum. Throws ConfigError naming the group and what is wrong.
std::vector<OptimGroup> optim_groups(const OptimConfig& config);

/// Refuses numbers that no optimizer can be made with, those of the groups too: averages, eps, momentum, decay, Newton-Schulz. Rates are a step's to say.
/// Throws ConfigError.
void check_optimizers(const OptimConfig& config);

/// Whether `optim.name`, or a group's, is one of these.
bool uses_optimizer(const OptimConfig& config, const std::set<std::string>& names);

/// What asks for one of these, for a refusal: "optim.name = muon", or "optim.groups = layers.*: name = muon"; empty if nothing does.
std::string setting_of_optimizer(const OptimConfig& config, const std::set<std::string>& names);

/// The optimizers that look at a key of the section ("momentum"); empty: all.
const std::set<std::string>& optimizers_that_use(const std::string& key);

/// The momentum of an optimizer where nobody gives one: Muon's is 0.95, the others' 0.
double default_momentum(const std::string& name);

/// That of a section, or a group: what it says, or its optimizer's own.
double momentum_of(const OptimConfig& optim);

}  // namespace tessera
