#pragma once

#include <memory>
#include <string>
#include <vector>

#include <torch/nn/module.h>

#include "tessera/fsdp/fully_shard.h"
#include "tessera/nn/parameter.h"

namespace tessera {

/// Which parameters of a module form which unit, and whose calls need them.
struct UnitPlan {
  struct Unit {
    std::string name;
    std::vector<nn::NamedParameter> parameters;
    size_t last_owner = 0;  ///< of `owners`, in the order of registration: after its call no other needs the unit in forward
  };
  /// A module whose call needs units: a wrapped one its own, one that is in no unit that of its parameters, both those of parameters tied to them.
  struct Owner {
    std::string path;
    std::shared_ptr<torch::nn::Module> module;
    std::vector<size_t> units;
  };
  /// A module with parameters that are registered there first.
  struct Holder {
    std::string path;
    std::shared_ptr<torch::nn::Module> module;
    size_t unit = 0;
  };

  std::vector<Unit> units;
  std::vector<Owner> owners;  ///< the root first, whether or not it needs any
  std::vector<Holder> holders;
};

/// Units of `root` as the options wrap them, in the order of registration. Throws ConfigError where a pattern matches nothing, or nothing is there to shard.
UnitPlan plan_units(torch::nn::Module& root, const FullyShardOptions& options);

}  // namespace tessera
