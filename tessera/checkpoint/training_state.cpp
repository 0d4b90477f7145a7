#include <algorithm>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <utility>

#include "tessera/checkpoint/checkpoint.h"
#include "tessera/checkpoint/fullest.h"
#include "tessera/checkpoint/gather_json.h"
#include "tessera/checkpoint/json_file.h"
#include "tessera/core/error.h"
#include "tessera/core/json_integer.h"
#include "tessera/core/json_reason.h"
#include "tessera/nn/attach.h"
#include "tessera/nn/gradient_dispatcher.h"
#include "tessera/nn/gradient_synchronizer.h"
#include "tessera/nn/names.h"
#include "tessera/nn/parameter.h"

// All state is tensors with slices under logical names: "model.", "buffer.", "optimizer.<state>.<parameter>". So loading is one question, asked of all alike:
// which stored boxes make up what is held here. Where precision has changed since, masters and weights stand in for each other, and the wider one has the last
// word. How often a parameter was updated is a number and no tensor, and has to agree with whether its state was read: Adam's first steps are scaled by it.

namespace tessera::checkpoint {

namespace {

Slice renamed(Slice slice, std::string name) {
  slice.name = std::move(name);
  return slice;
}

constexpr std::string_view kModel = "model.";

/// Wrappers hear that their parameters are read: a program may have put others in their place (set_data), which say nothing of slices.
void settle_wrappers(const torch::nn::Module& model) {
  std::set<const GradientSynchronizer*> asked;
  for (const auto& parameter : model.parameters()) {
    const GradientSynchronizer* const owner = nn::owner_of(parameter);
    if (owner != nullptr && asked.insert(owner).second) (void)owner->updated();
  }
}

bool is_state(std::string_view stored) { return stored.starts_with("optimizer."); }

constexpr std::string_view kMaster = "optimizer.master.";

/// Masters are filled as weights in fp32 are (fill_fullest), where the checkpoint has none for them, or has the weights in another type: what was written there
/// since the last update may round to the same here. Weights of another type take what there is of masters, and those that have none here need none: in both
/// cases the master is named as read. Where an update is delayed, masters are of the copies that are one update ahead, and stand in for these alone.
void fill_across_masters(std::vector<SlicedTensor>& targets, const Manifest& source) {
  std::set<std::string> held, as_stored;
  for (const auto& [tensor, slice] : targets) {
    held.insert(slice.name);
    if (is_stored_as(source, slice.name, tensor.scalar_type())) as_stored.insert(slice.name);
  }
  const size_t own = targets.size();
  for (size_t i = 0; i < own; ++i) {
    const std::string& name = targets[i].slice.name;
    const std::string parameter(parameter_of(name)), master = std::string(kMaster) + parameter;
    std::string weight = weight_of_master(source, parameter);
    const bool needs_none = held.contains(master) && as_stored.contains(weight);
    if (name == master) {
      if (source.tensors.contains(weight) && !(source.tensors.contains(master) && needs_none)) targets[i].slice.name = std::move(weight);
    } else if (name == weight && source.tensors.contains(master) && !needs_none) {
      targets.push_back({targets[i].tensor, renamed(targets[i].slice, master)});
    }
  }
}

/// Those that follow another of the model's parameters, under its name.
void add_followers(const torch::nn::Module& model, std::vector<SlicedTensor>& targets) {
  for (const auto& parameter : nn::following_parameters(model)) {
    targets.push_back({parameter.tensor, renamed(nn::slice_of(parameter.tensor), std::string(kModel) + parameter.name)});
  }
}

/// The parameters among tensors, by their own names. No other tensor has an update count.
std::vector<std::string> parameters_among(const std::set<std::string>& tensors) {
  std::vector<std::string> names;
  for (const auto& name : tensors) {
    if (name.starts_with(kModel)) names.push_back(name.substr(kModel.size()));
  }
  return names;
}

}  // namespace

std::vector<SlicedTensor> parameter_tensors(const torch::nn::Module& model) {
  settle_wrappers(model);
  nn::refuse_shared_names(model);
  std::vector<SlicedTensor> tensors;
  for (const auto& parameter : nn::unique_parameters(model)) tensors.push_back({parameter.tensor, renamed(nn::slice_of(parameter.tensor), parameter.name)});
  return tensors;
}

std::vector<SlicedTensor> parameter_targets(const torch::nn::Module& model) {
  auto targets = parameter_tensors(model);
  for (const auto& parameter : nn::following_parameters(model)) targets.push_back({parameter.tensor, renamed(nn::slice_of(parameter.tensor), parameter.name)});
  return targets;
}

namespace {
std::string_view rest(std::string_view text) { return text.substr(std::min(text.size(), text.find('.') + 1)); }
}  // namespace

std::string_view state_of(std::string_view stored) { return is_state(stored) ? rest(stored).substr(0, rest(stored).find('.')) : std::string_view(); }

std::string_view parameter_of(std::string_view stored) {
  if (is_state(stored)) return rest(rest(stored));
  return is_of_model(stored) ? rest(stored) : stored;
}

bool is_of_model(std::string_view stored) { return stored.starts_with(kModel) || stored.starts_with("buffer."); }

std::vector<SlicedTensor> gradient_tensors(const torch::nn::Module& model) { return gradient_tensors(nn::unique_parameters(model)); }

std::vector<SlicedTensor> gradient_tensors(const std::vector<nn::NamedParameter>& parameters) {
  std::vector<SlicedTensor> tensors;
  for (const auto& parameter : parameters) tensors.push_back({parameter.tensor.grad(), renamed(nn::slice_of(parameter.tensor), parameter.name)});
  return tensors;
}

std::vector<SlicedTensor> model_targets(const torch::nn::Module& model) {
  auto targets = training_tensors(model, nullptr);
  add_followers(model, targets);
  return targets;
}

namespace {

std::string stored_name(const optim::StateTensor& state) { return "optimizer." + state.state + "." + state.parameter; }

}  // namespace

std::vector<SlicedTensor> training_tensors(const torch::nn::Module& model, const optim::Optimizer* optimizer) {
  auto tensors = parameter_tensors(model);
  for (auto& held : tensors) held.slice.name.insert(0, "model.");
  for (const auto& buffer : model.named_buffers()) {
    if (buffer.value().defined()) tensors.push_back({buffer.value(), Slice::whole("buffer." + buffer.key(), buffer.value().sizes().vec())});
  }
  if (optimizer == nullptr) return tensors;
  for (auto& state : optimizer->state()) tensors.push_back({state.tensor, renamed(std::move(state.slice), stored_name(state))});
  return tensors;
}

void add_training_tensors(CheckpointState& state, const torch::nn::Module& model, const optim::Optimizer& optimizer) {
  state.tensors = training_tensors(model, nullptr);
  for (auto& held : optimizer.state_to_save()) {
    std::string name = stored_name(held);
    if (held.read) state.away[name] = std::move(held.read);
    state.tensors.push_back({held.tensor, renamed(std::move(held.slice), std::move(name))});
  }
}

namespace {

/// Parameters whose state has to be there before it is loaded: those that have some in the checkpoint, and those that are trained here in another type than
/// they are stored in. Their masters, where there are such, begin as the stored weights are, and not as these are rounded.
std::map<std::string, int64_t> held_for(const optim::Optimizer& optimizer, const Manifest& source) {
  std::map<std::string, int64_t> held;
  for (const auto& [name, stored] : source.tensors) {
    if (is_state(name)) held[std::string(parameter_of(name))] = 1;
  }
  for (const auto& group : optimizer.groups()) {
    for (const auto& [name, tensor, aliases] : group.parameters) {
      const std::string weight = std::string(kModel) + name;
      if (tensor.requires_grad() && source.tensors.contains(weight) && !is_stored_as(source, weight, tensor.scalar_type())) held[name] = 1;
    }
  }
  return held;
}

}  // namespace

std::vector<SlicedTensor> training_tensors(const torch::nn::Module& model, optim::Optimizer& optimizer, const Manifest& source) {
  optimizer.hold_state(held_for(optimizer, source));
  auto targets = training_tensors(model, &optimizer);
  add_followers(model, targets);
  std::erase_if(targets, [&](const SlicedTensor& target) {
    if (!is_state(target.slice.name) || source.tensors.contains(target.slice.name)) return false;
    if (state_of(target.slice.name) == optim::kNextState) return true;  // saved where updates are not delayed: whoever keeps it follows the weights
    const auto counts = source.optimizer.find("update_counts");
    return counts != source.optimizer.end() && !target.slice.name.starts_with(kMaster) &&
           counts->value(std::string(parameter_of(target.slice.name)), int64_t{-1}) == 0;
  });
  fill_across_masters(targets, source);
  return targets;
}

nlohmann::json optimizer_json(const optim::Optimizer& optimizer) {
  return {{"kind", optimizer.kind()}, {"kinds", optimizer.kinds()}, {"update_counts", optimizer.update_counts()}};
}

nlohmann::json optimizer_json(const optim::Optimizer& optimizer, const comm::Group& group) {
  nlohmann::json whole = optimizer_json(optimizer);
  for (const auto& other : gather_json(group, whole)) {
    for (const char* key : {"kinds", "update_counts"}) whole[key].update(other.at(key));
  }
  return whole;
}

nlohmann::json own_counts(const nlohmann::json& saved, const optim::Optimizer& optimizer) {
  const auto counts = saved.find("update_counts");
  if (counts == saved.end()) return saved;
  nlohmann::json own = saved, mine = nlohmann::json::object();
  for (const auto& [name, count] : optimizer.update_counts()) {
    if (counts->contains(name)) mine[name] = counts->at(name);
  }
  own["update_counts"] = std::move(mine);
  return own;
}

namespace {

/// The parameters that an optimizer of another kind has updated, as far as the checkpoint says so: what there is of their state is no state of this one.
std::set<std::string> updated_by_others(const nlohmann::json& saved, const optim::Optimizer& optimizer) {
  std::set<std::string> names;
  const auto kinds = saved.find("kinds"), counts = saved.find("update_counts");
  if (kinds == saved.end() || counts == saved.end()) return names;
  for (const auto& [name, kind] : optimizer.kinds()) {
    const bool other = kinds->contains(name) && kinds->at(name) != kind;
    if (other && counts->value(name, int64_t{0}) > 0) names.insert(name);  // what was never updated has nothing to lose
  }
  return names;
}

}  // namespace

void check_kinds(const nlohmann::json& saved, const optim::Optimizer& optimizer, const std::vector<std::string>& partial) {
  for (const auto& name : updated_by_others(saved, optimizer)) {
    if (may_differ(partial, name)) continue;
    throw ConfigError(detail::concat("optim.groups: '", name, "' is updated by ", optimizer.kinds().at(name), " here, and the checkpoint holds what ",
                                     saved.at("kinds").at(name).dump(), " kept of it; give it that one again, or name it in checkpoint.partial ",
                                     "(LoadOptions::partial), so that its state begins anew"));
  }
}

std::set<std::string> updates_ahead(const Manifest& manifest) {
  std::set<std::string> ahead;
  for (const auto& [name, stored] : manifest.tensors) {
    if (state_of(name) == optim::kNextState) ahead.emplace(parameter_of(name));
  }
  return ahead;
}

void restore_optimizer(const nlohmann::json& saved, optim::Optimizer& optimizer, const LoadReport& loaded) {
  try {
    const auto kind = saved.at("kind").get<std::string>();
    require(kind == optimizer.kind(), "optim.name = ", optimizer.kind(), ": the checkpoint's optimizer is ", kind);
    check_kinds(saved, optimizer, loaded.partial);
    std::map<std::string, int64_t> counts;
    for (const auto& [name, count] : saved.at("update_counts").items()) counts[name] = to_integer(count);
    for (const auto& name : parameters_among(loaded.unread)) counts.erase(name);
    for (const auto& name : parameters_among(loaded.fresh)) counts[name] = 0;
    for (const auto& name : loaded.fresh) {  // state that was not stored, of a weight that was
      const auto found = is_state(name) && !name.starts_with(kMaster) ? counts.find(std::string(parameter_of(name))) : counts.end();
      if (found != counts.end()) found->second = 0;
    }
    for (const auto& name : updated_by_others(saved, optimizer)) counts[name] = 0;
    optimizer.set_update_counts(counts);
    // Where a program goes back to a moment before a parameter's first update, what it has gathered since is forgotten; and so is what another kind of
    // optimizer has gathered under the same name.
    for (const auto& held : optimizer.state()) {
      if (held.state != "master" && held.state != optim::kNextState && counts.at(held.parameter) == 0) at::Tensor(held.tensor).zero_();
    }
  } catch (const nlohmann::json::exception& error) {
    throw ConfigError(detail::concat("the checkpoint's optimizer entry cannot be read: ", json_reason(error)));
  }
}

}  // namespace tessera::checkpoint
