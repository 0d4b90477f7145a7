#include "tessera/pipeline/split/split.h"

#include <algorithm>
#include <map>
#include <set>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>

#include "tessera/comm/collectives.h"
#include "tessera/nn/attach.h"
#include "tessera/nn/meta.h"
#include "tessera/pipeline/split/own_modules.h"

namespace tessera::pipeline {

namespace {

/// What is kept of inputs: their looks.
std::vector<at::Tensor> looks_of(const std::vector<at::Tensor>& inputs) {
  std::vector<at::Tensor> looks;
  for (const at::Tensor& tensor : inputs) {
    require(tensor.defined(), "pipeline: example input ", looks.size(), " is undefined; give a tensor of the shape and dtype that the pass gets");
    looks.push_back(at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(at::kMeta).requires_grad(false)));
    looks.back().set_requires_grad(tensor.requires_grad());
  }
  return looks;
}

}  // namespace

struct SplitModel::State {
  static constexpr size_t kMostRecordings = 64;  // where every step has new shapes, none of them is worth keeping

  std::shared_ptr<torch::nn::Module> root;
  std::vector<std::shared_ptr<torch::nn::Module>> modules;  ///< root and what is in it
  tape::Forward forward;
  SplitSpec splits;
  std::vector<at::Tensor> inputs;                    ///< as they look
  std::map<int, std::vector<at::Tensor>> inputs_of;  ///< of micro-batches that have others
  std::map<std::string, std::shared_ptr<const tape::Recording>> recordings;
  std::vector<std::set<std::string>> owned, called;  ///< by stage

  const std::vector<at::Tensor>& inputs_for(int micro_batch) const {
    const auto found = inputs_of.find(micro_batch);
    return found == inputs_of.end() ? inputs : found->second;
  }

  std::string key(const std::vector<at::Tensor>& inputs) const {
    std::string key = tape::mode_of(modules);
    for (const at::Tensor& input : inputs) key += ", " + tape::to_string(tape::form_of(input)) + (input.requires_grad() ? " with gradient" : "");
    return key;
  }

  std::shared_ptr<const tape::Recording> recording(int micro_batch) {
    const auto& inputs = inputs_for(micro_batch);
    const std::string key = this->key(inputs);
    if (recordings.size() >= kMostRecordings && !recordings.contains(key)) recordings.clear();
    auto& found = recordings[key];
    if (!found) {
      auto made = std::make_shared<const tape::Recording>(tape::make_recording(*root, forward, inputs, splits, tape::state_of(*root)));
      if (owned.empty()) {
        deal(*made);
      } else {
        check_owners(*made, key);
      }
      found = std::move(made);
    }
    return found;
  }

  /// Whose every parameter is. One that the pass does not use goes with the one registered before it, so that no checkpoint loses it.
  void deal(const tape::Recording& made) {
    owned.resize(static_cast<size_t>(made.stages.size()));
    called.resize(owned.size());
    std::map<std::string, std::set<size_t>> users;
    for (size_t s = 0; s < owned.size(); ++s) {
      const auto& stage = made.stages.stages[s];
      for (const int v : stage.state) {
        const tape::Value& value = made.graph->values[static_cast<size_t>(v)];
        users[value.name].insert(s);
        for (const std::string& alias : value.aliases) users[alias].insert(s);
      }
      for (int i = stage.begin; i < stage.end; ++i) {
        const tape::Node& node = made.graph->nodes[static_cast<size_t>(i)];
        if (node.call) called[s].insert(node.path);
      }
    }
    std::set<size_t> before{0};
    const auto give = [&](const std::string& name) {
      if (const auto found = users.find(name); found != users.end()) before = found->second;
      for (const size_t s : before) {
        owned[s].insert(name);
        if (!users.contains(name)) break;
      }
    };
    for (const auto& item : root->named_parameters()) give(item.key());
    for (const auto& item : root->named_buffers()) give(item.key());
  }

  void check_owners(const tape::Recording& made, const std::string& key) const {
    for (size_t s = 0; s < owned.size(); ++s) {
      for (const int v : made.stages.stages[s].state) {
        const std::string& name = made.graph->values[static_cast<size_t>(v)].name;
        require(owned[s].contains(name), "pipeline: with these inputs and modes (", key, ") stage ", s, " uses '", name,
                "', which it did not when the model was split; split it in the mode and with the shapes that use all of it");
      }
    }
  }
};

SplitModel::SplitModel(std::shared_ptr<torch::nn::Module> root, tape::Forward forward, std::vector<at::Tensor> example_inputs, SplitSpec splits)
    : state_(std::make_shared<State>()) {
  tape::check_split_points(*root, splits);
  nn::assign_paths(*root);
  state_->modules = root->modules(/*include_self=*/false);
  state_->modules.push_back(root);
  state_->root = std::move(root);
  state_->forward = std::move(forward);
  state_->splits = std::move(splits);
  expect(example_inputs);
  state_->recording(0);
}

int SplitModel::stages() const { return static_cast<int>(state_->splits.size()) + 1; }

std::string SplitModel::to_string() const { return tape::to_string(*recording(), tape::short_name(state_->root->name())); }

std::shared_ptr<const tape::Recording> SplitModel::recording(int micro_batch) const { return state_->recording(micro_batch); }

Crossings SplitModel::crossings() const {
  const auto recording = this->recording();
  Crossings crossings;
  for (size_t c = 0; c < recording->stages.crossings.size(); ++c) {
    const tape::Crossing& crossing = recording->stages.crossings[c];
    const auto number = [&](const std::vector<int>& list) { return static_cast<int>(std::ranges::find(list, static_cast<int>(c)) - list.begin()); };
    crossings.push_back({.from = crossing.from,
                         .to = crossing.to,
                         .output = number(recording->stages.stages[static_cast<size_t>(crossing.from)].sends),
                         .input = number(recording->stages.stages[static_cast<size_t>(crossing.to)].receives),
                         .takes_gradient = crossing.gradient});
  }
  return crossings;
}

std::vector<int> SplitModel::takes(int stage) const {
  check_stage(stage);
  return recording()->stages.stages[static_cast<size_t>(stage)].fed;
}

std::shared_ptr<torch::nn::Module> SplitModel::module(int stage) const {
  check_stage(stage);
  return tape::own_modules(*state_->root, state_->owned[static_cast<size_t>(stage)], state_->called[static_cast<size_t>(stage)]);
}

void SplitModel::keep_only(const std::vector<int>& stages) const {
  std::set<const c10::TensorImpl*> kept;
  for (const int stage : stages) {
    const auto part = module(stage);
    for (const at::Tensor& tensor : part->parameters()) kept.insert(tensor.unsafeGetTensorImpl());
    for (const at::Tensor& tensor : part->buffers()) kept.insert(tensor.unsafeGetTensorImpl());
  }
  const auto let_go = [&](const at::Tensor& tensor) {
    if (tensor.defined() && !tensor.is_meta() && !kept.contains(tensor.unsafeGetTensorImpl())) nn::materialize_storage(tensor, at::kMeta);
  };
  for (const at::Tensor& tensor : state_->root->parameters()) let_go(tensor);
  for (const at::Tensor& tensor : state_->root->buffers()) let_go(tensor);
}

void SplitModel::check_stage(int stage) const {
  require(stage >= 0 && stage < stages(), "pipeline: there is no stage ", stage, "; the model has stages 0 to ", stages() - 1);
}

void SplitModel::expect(const std::vector<at::Tensor>& inputs) const {
  state_->inputs = looks_of(inputs);
  state_->inputs_of.clear();
}

void SplitModel::expect(const std::vector<at::Tensor>& inputs, int micro_batch) const { state_->inputs_of[micro_batch] = looks_of(inputs); }

void SplitModel::check_agreement(const comm::Group& group) const {
  const auto mine = static_cast<int64_t>(recording()->fingerprint);
  const at::Tensor in = at::empty({1}, at::kLong).fill_(mine), all = at::empty({group.size()}, at::kLong);
  comm::all_gather(group, all, in);
  for (int rank = 0; rank < group.size(); ++rank) {
    require(all.data_ptr<int64_t>()[rank] == all.data_ptr<int64_t>()[0], "pipeline: ranks 0 and ", rank, " of group '", group.name(),
            "' have recorded different graphs of ", tape::short_name(state_->root->name()),
            "; build the same model on every rank, give expect() the same shapes, and switch train() and autocast alike");
  }
}

}  // namespace tessera::pipeline
