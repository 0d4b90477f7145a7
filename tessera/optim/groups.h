#pragma once

#include <string>
#include <vector>

#include "tessera/config/optim_groups.h"
#include "tessera/nn/parameter.h"
#include "tessera/optim/optimizer.h"

/// Which settings a parameter is updated with: `optim.groups`, by patterns of names.
namespace tessera::optim {

/// Whether a group is of parameter `name`: its pattern (nn::matches) is the parameter's path, or that of a module that holds it.
bool is_of(const OptimGroup& group, const std::string& name);

/// Of one parameter.
struct ParameterSettings {
  OptimConfig settings;
  double lr_factor = 1;
};

/// Those of the first of `groups` that `name` is of, else the section's. A tensor of fewer than two dimensions does not decay with decay_on = matrices, unless
/// its group says how it does. Muon is of the matrices of hidden layers: of vectors, embeddings and output heads (`model` names them) it is AdamW. `dims` are
/// those of the logical tensor, so that all ranks say the same of a parameter, whatever they hold of it.
ParameterSettings settings_of(const OptimConfig& config, const std::vector<OptimGroup>& groups, const std::string& name, size_t dims,
                              const WholeModel& model = {});

/// What one optimizer updates: parameters whose settings differ in learning rate and decay alone.
struct OptimizerShare {
  OptimConfig settings;  ///< of its first parameter
  std::vector<ParameterGroup> groups;
  WholeModel model;  ///< with those of its parameters alone
};

/// Deals parameters over optimizers, in the order of `model.parameters`, the same on all ranks that meet; so a share may have no parameters on this rank.
std::vector<OptimizerShare> deal_groups(const OptimConfig& config, const std::vector<nn::NamedParameter>& parameters, const WholeModel& model);

/// Refuses groups that are of none of the whole model's parameters, which `model` names, or else `parameters`: the pattern matches nothing (names the nearest
/// path), another name of a tied weight alone (names the first), or what earlier groups have. Throws ConfigError.
void check_groups(const OptimConfig& config, const std::vector<nn::NamedParameter>& parameters, const WholeModel& model = {});

/// The groups of which every parameter that takes its settings from them is frozen, each with the reason: to be said aloud. Expects what check_groups takes.
std::vector<std::string> groups_without_effect(const OptimConfig& config, const std::vector<nn::NamedParameter>& parameters);

}  // namespace tessera::optim
