#include "tessera/checkpoint/torch_optimizer.h"

#include <algorithm>
#include <array>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include <ATen/ops/zeros_like.h>
#include <c10/core/ScalarType.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include "tessera/checkpoint/gather_json.h"
#include "tessera/checkpoint/hook_prefix.h"
#include "tessera/checkpoint/json_file.h"
#include "tessera/checkpoint/safetensors.h"
#include "tessera/checkpoint/save_steps.h"
#include "tessera/checkpoint/unread.h"
#include "tessera/core/error.h"
#include "tessera/core/json_integer.h"
#include "tessera/core/json_reason.h"
#include "tessera/memory/memory.h"
#include "tessera/nn/attach.h"
#include "tessera/nn/kept_memory.h"
#include "tessera/nn/names.h"

// libtorch's optimizers keep state by a tensor's address, in a class for each kind. A table of accessors says what each kind has for every element of a
// parameter, and so may be cut as the parameter is. Restored state is built beside the one that is there, and takes its place only when all of it has been
// read: a checkpoint that does not fit changes nothing.

namespace tessera::checkpoint {
namespace {

using torch::optim::OptimizerParamState;

/// What there is to know of one kind of optimizer's state.
struct Kind {
  struct Field {
    const char* name;
    std::function<at::Tensor&(OptimizerParamState&)> tensor;
    const char* option = nullptr;  ///< with which alone it is there; null: always
    std::function<bool(torch::optim::OptimizerOptions&)> is_on{};
  };
  std::string name;  ///< torch.optim's, in lower case
  std::vector<Field> fields;
  std::function<int64_t(OptimizerParamState&)> count;
  std::function<void(OptimizerParamState&, int64_t)> set_count;
  std::function<std::unique_ptr<OptimizerParamState>()> make;
  bool from_start = false;  ///< state is there before the first update, and has to be
};

template <class State>
Kind::Field field(const char* name, at::Tensor& (State::*tensor)() noexcept) {
  return {name, [tensor](OptimizerParamState& state) -> at::Tensor& { return (static_cast<State&>(state).*tensor)(); }};
}

/// There where an option is.
template <class State, class Options, class Value>
Kind::Field field(const char* name, at::Tensor& (State::*tensor)() noexcept, const char* option, Value& (Options::*value)() noexcept) {
  Kind::Field made = field(name, tensor);
  made.option = option;
  made.is_on = [value](torch::optim::OptimizerOptions& options) { return static_cast<bool>((static_cast<Options&>(options).*value)()); };
  return made;
}

template <class State>
Kind counted(std::string name, std::vector<Kind::Field> fields) {
  return {std::move(name), std::move(fields), [](OptimizerParamState& state) { return static_cast<State&>(state).step(); },
          [](OptimizerParamState& state, int64_t count) { static_cast<State&>(state).step(count); }, [] { return std::make_unique<State>(); }};
}

template <class State, class Options>
Kind of_adam(std::string name) {
  return counted<State>(std::move(name), {field<State>("exp_avg", &State::exp_avg), field<State>("exp_avg_sq", &State::exp_avg_sq),
                                          field("max_exp_avg_sq", &State::max_exp_avg_sq, "amsgrad", &Options::amsgrad)});
}

Kind kind_of(const torch::optim::Optimizer& optimizer) {
  using namespace torch::optim;
  if (dynamic_cast<const Adam*>(&optimizer)) return of_adam<AdamParamState, AdamOptions>("adam");
  if (dynamic_cast<const AdamW*>(&optimizer)) return of_adam<AdamWParamState, AdamWOptions>("adamw");
  if (dynamic_cast<const Adagrad*>(&optimizer)) {
    Kind kind = counted<AdagradParamState>("adagrad", {field<AdagradParamState>("sum", &AdagradParamState::sum)});
    kind.from_start = true;
    return kind;
  }
  if (dynamic_cast<const RMSprop*>(&optimizer)) {
    using State = RMSpropParamState;
    return counted<State>(
        "rmsprop", {field<State>("square_avg", &State::square_avg), field("momentum_buffer", &State::momentum_buffer, "momentum", &RMSpropOptions::momentum),
                    field("grad_avg", &State::grad_avg, "centered", &RMSpropOptions::centered)});
  }
  require(
      dynamic_cast<const SGD*>(&optimizer) != nullptr,
      "checkpoint: this optimizer of libtorch is none of Adam, AdamW, SGD, Adagrad and RMSprop, whose state lies over the parameters element by element; use "
      "one of these, or save its state yourself");
  // Without counts: its momentum is there from the first update on.
  return {"sgd",
          {field("momentum_buffer", &SGDParamState::momentum_buffer, "momentum", &SGDOptions::momentum)},
          [](OptimizerParamState&) { return int64_t{1}; },
          [](OptimizerParamState&, int64_t) {},
          [] { return std::make_unique<SGDParamState>(); }};
}

struct Updated {
  std::string name;
  at::Tensor tensor;
  torch::optim::OptimizerParamGroup* group;
};

/// Each once: a module's parameters() lists a tied one by each of its names, and libtorch's optimizers keep what they are given.
std::vector<Updated> updated_by(const torch::nn::Module& model, const torch::optim::Optimizer& optimizer) {
  std::unordered_map<const void*, std::string> names;
  for (const auto& parameter : nn::unique_parameters(model)) names.emplace(parameter.tensor.unsafeGetTensorImpl(), parameter.name);
  std::vector<Updated> updated;
  std::unordered_set<const void*> seen;
  // param_groups() of a const optimizer gives groups that cannot tell their learning rate.
  for (auto& group : const_cast<torch::optim::Optimizer&>(optimizer).param_groups()) {
    for (const at::Tensor& tensor : group.params()) {
      if (!seen.insert(tensor.unsafeGetTensorImpl()).second) continue;
      const at::Tensor parameter = nn::updated_for(tensor);
      const auto known = parameter.defined() ? names.find(parameter.unsafeGetTensorImpl()) : names.end();
      require(
          known != names.end(), "checkpoint: the optimizer updates a tensor of shape ", tensor.sizes(),
          " that is no parameter of this model, nor this rank's part of one, so there is no name to save its state under; give it the model that it updates");
      updated.push_back({known->second, tensor, &group});
    }
  }
  return updated;
}

SlicedTensor over(const Updated& parameter, const std::string& state, const at::Tensor& tensor) {
  Slice slice = nn::slice_of(parameter.tensor);
  slice.name = "optimizer." + state + "." + parameter.name;
  return {tensor, std::move(slice)};
}

/// Entries of a JSON object, or none.
template <class F>
auto read(const nlohmann::json& saved, F&& f) {
  try {
    return f(saved);
  } catch (const nlohmann::json::exception& error) {
    throw ConfigError(detail::concat("the checkpoint's optimizer entry cannot be read: ", json_reason(error)));
  }
}

/// What an optimizer's entry says of each parameter.
constexpr std::array kByParameter{"kinds", "update_counts", "lr"};

/// `state` has its step, tensors and optimizer.
std::filesystem::path save_all(const std::filesystem::path& dir, CheckpointState state, const nlohmann::json& progress, const comm::Group& group) {
  const auto all = gather_json(group, {{"progress", progress}, {"problem", problem_with_progress(progress)}});
  for (const auto& other : all) {  // before any is compared: what is no number arrives as null, and equals nothing
    const auto problem = other.at("problem").get<std::string>();
    require(problem.empty(), problem);
  }
  for (size_t rank = 0; const auto& other : all) {
    require(other.at("progress") == progress, "checkpoint: progress of rank ", rank, " is another than rank ", group.rank(),
            "'s, and a checkpoint has one; give all ranks the same: what is each rank's own they tell each other before (checkpoint::gather_json)");
    ++rank;
  }
  state.progress = progress;
  state.agreement = nlohmann::json::object();
  return save(dir, state, group);
}

}  // namespace

std::vector<SlicedTensor> optimizer_tensors(const torch::nn::Module& model, const torch::optim::Optimizer& optimizer) {
  const Kind kind = kind_of(optimizer);
  std::vector<SlicedTensor> tensors;
  for (const auto& parameter : updated_by(model, optimizer)) {
    const auto state = optimizer.state().find(parameter.tensor.unsafeGetTensorImpl());
    if (state == optimizer.state().end()) continue;
    for (const auto& field : kind.fields) {
      if (const at::Tensor& tensor = field.tensor(*state->second); tensor.defined()) tensors.push_back(over(parameter, field.name, tensor));
    }
  }
  return tensors;
}

nlohmann::json optimizer_json(const torch::nn::Module& model, torch::optim::Optimizer& optimizer, const comm::Group& group) {
  const Kind kind = kind_of(optimizer);
  nlohmann::json mine{{"kind", kind.name}};
  for (const char* key : kByParameter) mine[key] = nlohmann::json::object();
  for (const auto& parameter : updated_by(model, optimizer)) {
    mine["kinds"][parameter.name] = kind.name;
    mine["lr"][parameter.name] = parameter.group->options().get_lr();
    const auto state = optimizer.state().find(parameter.tensor.unsafeGetTensorImpl());
    if (state != optimizer.state().end()) mine["update_counts"][parameter.name] = kind.count(*state->second);
  }
  nlohmann::json all = std::move(mine);
  for (const auto& other : gather_json(group, all)) {
    for (const char* key : kByParameter) all[key].update(other.at(key));
  }
  // Nothing is kept of what had no update, and nothing by SGD without momentum. Of all ranks: one whose part is empty may have none of what others have.
  for (const auto& [name, by] : all.at("kinds").items()) {
    if (!all.at("update_counts").contains(name)) all["update_counts"][name] = 0;
  }
  return all;
}

namespace {

/// State that a checkpoint has for an optimizer's parameters, beside the one that it has now.
struct Restored {
  struct State {
    void* key;
    std::unique_ptr<OptimizerParamState> state;  ///< null: never updated
    std::vector<std::string> stored;             ///< the parameter and what its state was read from
  };
  struct Rate {
    double value;
    std::string parameter;  ///< the first that has it
  };
  std::vector<SlicedTensor> targets;
  std::set<std::string> widened;  ///< of the targets, by name, those that are of a wider type than is stored
  std::vector<State> states;
  std::map<torch::optim::OptimizerParamGroup*, Rate> rates;

  /// What LoadOptions::partial left as it was keeps the state that it has.
  void install(torch::optim::Optimizer& optimizer, const LoadReport& report) {
    for (auto& [key, state, stored] : states) {
      if (std::ranges::any_of(stored, [&](const std::string& name) { return report.fresh.contains(name); })) continue;
      optimizer.state().erase(key);
      if (state) optimizer.state()[key] = std::move(state);
    }
    for (const auto& [group, rate] : rates) group->options().set_lr(rate.value);
  }

  void set_rate(torch::optim::OptimizerParamGroup* group, double value, const std::string& parameter) {
    const auto& first = rates.try_emplace(group, Rate{value, parameter}).first->second;
    require(first.value == value, "the checkpoint's optimizer has learning rates of ", first.value, " ('", first.parameter, "') and ", value, " ('", parameter,
            "') for parameters that are in one group here; make the groups that were saved (OptimizerParamGroup), or load the model alone");
  }
};

Restored states_from(const Manifest& manifest, const torch::nn::Module& model, const torch::optim::Optimizer& optimizer,
                     const std::vector<std::string>& partial) {
  const Kind kind = kind_of(optimizer);
  const MemoryScope scope(MemoryCategory::Optimizer);
  const at::NoGradGuard no_grad;
  Restored restored;
  for (const auto& parameter : updated_by(model, optimizer)) {
    const auto by = read(manifest.optimizer, [&](const nlohmann::json& json) {
      const auto kinds = json.find("kinds");
      return kinds != json.end() ? kinds->value(parameter.name, kind.name) : kind.name;
    });
    const auto count = read(manifest.optimizer, [&](const nlohmann::json& json) -> std::optional<int64_t> {
      const auto rates = json.find("lr");  // another kind's is none for this one
      if (by == kind.name && rates != json.end() && rates->contains(parameter.name))
        restored.set_rate(parameter.group, rates->at(parameter.name).get<double>(), parameter.name);
      const auto& counts = json.at("update_counts");
      return counts.contains(parameter.name) ? std::optional(to_integer(counts.at(parameter.name))) : std::nullopt;
    });
    if (by != kind.name && count.value_or(0) > 0) {
      require(may_differ(partial, parameter.name), "the checkpoint's '", parameter.name, "' was updated by ", by, ", and here it is by ", kind.name,
              "; make the optimizers that were saved, or name it in LoadOptions::partial, so that its state begins anew");
      if (!kind.from_start) restored.states.push_back({.key = parameter.tensor.unsafeGetTensorImpl(), .state = nullptr, .stored = {}});
      continue;
    }
    if (kind.from_start && (!count || by != kind.name)) continue;
    auto& [key, state, stored] = restored.states.emplace_back(parameter.tensor.unsafeGetTensorImpl(), nullptr, std::vector{"model." + parameter.name});
    for (const auto& field : kind.fields) {
      auto held = over(parameter, field.name, {});
      const bool is_stored = manifest.tensors.contains(held.slice.name);
      require(count.value_or(0) == 0 || is_stored || field.option == nullptr || !field.is_on(parameter.group->options()), "the checkpoint's optimizer (",
              kind.name, ") was saved without ", field.option, ", and has no ", field.name, " for '", parameter.name, "', which this one needs with its ",
              field.option, "; make the optimizer with the options that were saved, or load the model alone");
      if (!count || !is_stored) continue;
      if (!state) state = kind.make();
      nn::show_part(parameter.tensor);  // behind a forward that no backward has followed it would be made as large as the whole
      // Of the wider of two types: a momentum is a copy of the first gradient, which may be wider than its parameter; and libtorch's updates, which round to
      // nearest, would leave averages of fewer bits as they are.
      const at::ScalarType saved = dtype_from_name(manifest.tensors.at(held.slice.name).dtype);
      const at::ScalarType dtype = c10::promoteTypes(saved, parameter.tensor.scalar_type());
      if (dtype != saved) restored.widened.insert(held.slice.name);
      field.tensor(*state) = held.tensor = at::zeros_like(parameter.tensor, parameter.tensor.options().dtype(dtype));
      stored.push_back(held.slice.name);
      restored.targets.push_back(std::move(held));
    }
    if (state) kind.set_count(*state, *count);
  }
  return restored;
}

/// Such as "adamw", or, of several, "sgd+adamw".
std::string kinds_of(const Optimizers& optimizers) {
  std::string kinds;
  for (const auto& optimizer : optimizers) kinds += (kinds.empty() ? "" : "+") + kind_of(optimizer).name;
  return kinds;
}

void require_kind(const Manifest& manifest, const std::string& here) {
  const auto saved = read(manifest.optimizer, [](const nlohmann::json& json) { return json.at("kind").get<std::string>(); });
  require(saved == here, "the checkpoint's optimizer is ", saved, " and this one is ", here, "; make the one that was saved, or load the model alone");
}

/// Before a tensor is filled, of a checkpoint that is to be read as a whole.
/// Of the model's parameters; where others were updated, it is another model, and load() has more to say of that.
void require_counts(const nlohmann::json& saved, const torch::nn::Module& model, const optim::Optimizer& optimizer) {
  nlohmann::json unknown = read(saved, [](const nlohmann::json& json) { return json.at("update_counts"); });
  std::string missing, extra;
  const auto add = [](std::string& list, const std::string& name) { list += (list.empty() ? "" : "; ") + name; };
  for (const auto& [name, count] : optimizer.update_counts()) {
    if (!unknown.is_object() || unknown.erase(name) == 0) add(missing, name);
  }
  require(missing.empty(), "the checkpoint does not say how often these were updated: ", missing,
          "; load the model alone, or what was saved with them, or name them in LoadOptions::partial");
  for (const auto& parameter : nn::unique_parameters(model)) {
    if (unknown.contains(parameter.name)) add(extra, parameter.name);
  }
  require(extra.empty(), "the checkpoint's optimizer updated these, and this one does not: ", extra,
          "; give it the parameters that were saved, or name these in LoadOptions::partial");
}

/// `saved` as far as it is this optimizer's: of the parameters that `partial` names it may lack some, which count from 0, and have others, as of those whose
/// weights stay unread.
nlohmann::json counts_of(nlohmann::json saved, const optim::Optimizer& optimizer, const LoadOptions& options) {
  const auto counts = saved.find("update_counts");
  if (counts == saved.end() || !counts->is_object()) return saved;
  const auto own = optimizer.update_counts();
  std::vector<std::string> others;
  for (const auto& [name, count] : counts->items()) {
    if (own.contains(name)) continue;
    const bool is_left = count == 0 || may_differ(options.partial, name) || may_stay_unread(options, "model." + name);  // what was never updated is no loss
    if (is_left) others.push_back(name);
  }
  for (const auto& name : others) counts->erase(name);
  for (const auto& [name, count] : own) {
    if (!counts->contains(name) && may_differ(options.partial, name)) (*counts)[name] = 0;
  }
  return saved;
}

/// Each parameter has one optimizer.
nlohmann::json json_of(const torch::nn::Module& model, const Optimizers& optimizers, const comm::Group& group) {
  nlohmann::json all;
  for (const auto& optimizer : optimizers) {
    const nlohmann::json one = optimizer_json(model, optimizer, group);
    for (const auto& [name, rate] : one.at("lr").items()) {
      require(!all.contains("lr") || !all.at("lr").contains(name), "checkpoint: '", name,
              "' is updated by two of the optimizers; give each its own parameters");
    }
    for (const char* key : kByParameter) all[key].update(one.at(key));
  }
  all["kind"] = kinds_of(optimizers);
  return all;
}

/// What gradients were compressed with is for load_hook_state (train/hook_state.h) to read, where there are hooks.
LoadOptions without_hooks(LoadOptions options) {
  options.ignore_prefixes.emplace_back(kHookPrefix);
  return options;
}

Manifest read_manifest_with_optimizer(const std::filesystem::path& folder) {
  Manifest manifest = read_or_name_another([&] { return read_manifest(folder); });
  require(!manifest.optimizer.empty(), folder.string(), ": saved without an optimizer; load the model alone: checkpoint::load(folder, model)");
  return manifest;
}

}  // namespace

std::filesystem::path save(const std::filesystem::path& dir, int64_t step, const torch::nn::Module& model, torch::optim::Optimizer& optimizer,
                           const comm::Group& group, const nlohmann::json& progress) {
  return save(dir, step, model, Optimizers{optimizer}, group, progress);
}

std::filesystem::path save(const std::filesystem::path& dir, int64_t step, const torch::nn::Module& model, const Optimizers& optimizers,
                           const comm::Group& group, const nlohmann::json& progress) {
  CheckpointState state{.step = step, .tensors = training_tensors(model, nullptr), .optimizer = json_of(model, optimizers, group)};
  for (const auto& optimizer : optimizers) {
    for (auto& held : optimizer_tensors(model, optimizer)) state.tensors.push_back(std::move(held));
  }
  return save_all(dir, std::move(state), progress, group);
}

std::filesystem::path save(const std::filesystem::path& dir, int64_t step, const torch::nn::Module& model, const optim::Optimizer& optimizer,
                           const comm::Group& group, const nlohmann::json& progress) {
  CheckpointState state{.step = step, .optimizer = optimizer_json(optimizer, group)};
  add_training_tensors(state, model, optimizer);
  return save_all(dir, std::move(state), progress, group);
}

std::filesystem::path save(const std::filesystem::path& dir, int64_t step, const torch::nn::Module& model, const comm::Group& group,
                           const nlohmann::json& progress) {
  return save_all(dir, {.step = step, .tensors = training_tensors(model, nullptr), .optimizer = nlohmann::json::object()}, progress, group);
}

Resumed load(const std::filesystem::path& folder, const torch::nn::Module& model, torch::optim::Optimizer& optimizer, const LoadOptions& options) {
  return load(folder, model, Optimizers{optimizer}, options);
}

Resumed load(const std::filesystem::path& folder, const torch::nn::Module& model, const Optimizers& optimizers, const LoadOptions& options) {
  const Manifest manifest = read_manifest_with_optimizer(folder);
  require_kind(manifest, kinds_of(optimizers));
  auto targets = training_tensors(model, nullptr);
  std::vector<Restored> restored;
  LoadOptions widening = without_hooks(options);
  for (const auto& optimizer : optimizers) {
    const auto& own = restored.emplace_back(states_from(manifest, model, optimizer, options.partial));
    targets.insert(targets.end(), own.targets.begin(), own.targets.end());
    widening.converted.insert(own.widened.begin(), own.widened.end());
  }
  Resumed resumed{manifest.step, manifest.progress, load(folder, manifest, targets, widening)};
  for (size_t i = 0; i < restored.size(); ++i) restored[i].install(optimizers[i], resumed.report);
  return resumed;
}

Resumed load(const std::filesystem::path& folder, const torch::nn::Module& model, optim::Optimizer& optimizer, const LoadOptions& options) {
  const Manifest manifest = read_manifest_with_optimizer(folder);
  require_kind(manifest, optimizer.kind());
  const bool of_more = !options.expected.empty();
  const nlohmann::json saved = counts_of(of_more ? own_counts(manifest.optimizer, optimizer) : manifest.optimizer, optimizer, options);
  if (!of_more) require_counts(saved, model, optimizer);
  read(saved, [&](const nlohmann::json& json) { check_kinds(json, optimizer, options.partial); });
  Resumed resumed{manifest.step, manifest.progress, load(folder, manifest, training_tensors(model, optimizer, manifest), without_hooks(options))};
  restore_optimizer(saved, optimizer, resumed.report);
  optimizer.follow_all_but(updates_ahead(manifest));
  return resumed;
}

Resumed load(const std::filesystem::path& folder, const torch::nn::Module& model, LoadOptions options) {
  const Manifest manifest = read_or_name_another([&] { return read_manifest(folder); });
  options.ignore_prefixes.emplace_back("optimizer.");
  return {manifest.step, manifest.progress, load(folder, manifest, training_tensors(model, nullptr), without_hooks(std::move(options)))};
}

}  // namespace tessera::checkpoint
