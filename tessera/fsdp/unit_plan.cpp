#include "tessera/fsdp/unit_plan.h"

#include <algorithm>
#include <optional>
#include <unordered_map>
#include <unordered_set>

#include "tessera/core/error.h"
#include "tessera/nn/attach.h"

// What is gathered together should be used together, and the order of registration is the best that is known before the first call. So what no pattern wraps
// does not become one unit, which would be in memory from the embedding to the head, but one for each stretch between wrapped modules. A tied parameter stays
// in the first unit that meets it, and whoever else uses it needs that unit, too.

namespace tessera {
namespace {

using ModuleSet = std::unordered_set<const torch::nn::Module*>;

ModuleSet wrapped_modules(torch::nn::Module& root, const FullyShardOptions& options) {
  require(options.wrap.empty() || !options.policy, "fully_shard: wrap = '", options.wrap, "' and a policy were both given; leave one of them out");
  ModuleSet wrapped;
  if (!options.wrap.empty()) {
    try {
      for (const auto& [path, module] : nn::modules_matching(root, options.wrap)) wrapped.insert(module.get());
    } catch (const ConfigError& error) {
      throw ConfigError(detail::concat("fully_shard: wrap = '", options.wrap, "': ", error.what()));
    }
  } else if (options.policy) {
    for (const auto& module : root.named_modules("", /*include_self=*/false)) {
      if (options.policy(module.key(), *module.value())) wrapped.insert(module.value().get());
    }
  }
  return wrapped;
}

/// Walks the tree in the order of registration and deals parameters as it meets them.
class Planner {
 public:
  Planner(ModuleSet wrapped, const torch::nn::Module& root, const nn::ParameterFilter& only) : wrapped_(std::move(wrapped)) {
    for (const auto& parameter : nn::unique_parameters(root, only)) named_.emplace(parameter.tensor.unsafeGetTensorImpl(), parameter);
  }

  UnitPlan plan(const std::shared_ptr<torch::nn::Module>& root) {
    owner_of("", root);
    visit("", root, nullptr);
    for (size_t owner = 0; owner < plan_.owners.size(); ++owner) {
      for (const size_t unit : plan_.owners[owner].units) plan_.units[unit].last_owner = owner;
    }
    return std::move(plan_);
  }

 private:
  /// The wrapped module that we are in, and its unit once it has one.
  struct Enclosing {
    std::string path;
    std::shared_ptr<torch::nn::Module> module;
    std::optional<size_t> unit;
  };

  void visit(const std::string& path, const std::shared_ptr<torch::nn::Module>& module, Enclosing* enclosing) {
    Enclosing own{path, module, {}};
    if (wrapped_.contains(module.get())) enclosing = &own;
    for (const auto& parameter : module->named_parameters(/*recurse=*/false)) {
      if (parameter.value().defined()) deal(path, module, parameter.value(), enclosing);
    }
    for (const auto& child : module->named_children()) visit(path.empty() ? child.key() : path + "." + child.key(), child.value(), enclosing);
    if (enclosing == &own) rest_.reset();  // what comes after a wrapped module is used after it
  }

  void deal(const std::string& path, const std::shared_ptr<torch::nn::Module>& module, const at::Tensor& parameter, Enclosing* enclosing) {
    auto* key = parameter.unsafeGetTensorImpl();
    if (!named_.contains(key)) return;  // another's
    if (const auto known = unit_of_.find(key); known != unit_of_.end()) return need(path, module, enclosing, known->second);
    std::optional<size_t>& unit = enclosing ? enclosing->unit : rest_;
    if (!unit) {
      unit = plan_.units.size();
      const std::string& name = enclosing ? enclosing->path : path;
      plan_.units.push_back({.name = name.empty() ? "(root)" : name});
    }
    unit_of_.emplace(key, *unit);
    plan_.units[*unit].parameters.push_back(named_.at(key));
    if (plan_.holders.empty() || plan_.holders.back().module != module) plan_.holders.push_back({path, module, *unit});
    need(path, module, enclosing, *unit);
  }

  void need(const std::string& path, const std::shared_ptr<torch::nn::Module>& module, const Enclosing* enclosing, size_t unit) {
    auto& units = plan_.owners[enclosing ? owner_of(enclosing->path, enclosing->module) : owner_of(path, module)].units;
    if (std::ranges::find(units, unit) == units.end()) units.push_back(unit);
  }

  size_t owner_of(const std::string& path, const std::shared_ptr<torch::nn::Module>& module) {
    const auto [it, is_new] = owner_index_.emplace(module.get(), plan_.owners.size());
    if (is_new) plan_.owners.push_back({path, module, {}});
    return it->second;
  }

  ModuleSet wrapped_;
  std::unordered_map<c10::TensorImpl*, nn::NamedParameter> named_;
  std::unordered_map<c10::TensorImpl*, size_t> unit_of_;
  std::unordered_map<const torch::nn::Module*, size_t> owner_index_;
  std::optional<size_t> rest_;
  UnitPlan plan_;
};

int64_t elements_of(const torch::nn::Module& module) {
  int64_t elements = 0;
  for (const auto& parameter : nn::unique_parameters(module)) elements += parameter.tensor.numel();
  return elements;
}

}  // namespace

WrapPolicy wrap_by_size(int64_t parameters) {
  require(parameters > 0, "fully_shard: wrap_by_size(", parameters, ") must be given a positive number of elements");
  return [parameters](const std::string&, const torch::nn::Module& module) { return elements_of(module) >= parameters; };
}

UnitPlan plan_units(torch::nn::Module& root, const FullyShardOptions& options) {
  UnitPlan plan = Planner(wrapped_modules(root, options), root, options.only).plan(nn::share(root));
  require(!plan.units.empty(), "fully_shard: module '", root.name(), "' has no parameters", options.only ? " among those that `only` picks" : "",
          "; there is nothing to shard");
  return plan;
}

}  // namespace tessera
