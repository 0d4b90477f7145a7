#include "tessera/pipeline/split/pipeline.h"

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

namespace tessera {

namespace {

/// What is kept of an input: its looks.
at::Tensor looks_of(const at::Tensor& tensor) {
  require(tensor.defined(), "pipeline: an example input is undefined; give a tensor of the shape and dtype that the pass gets");
  return at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(at::kMeta).requires_grad(false)).set_requires_grad(tensor.requires_grad());
}

}  // namespace

struct SplitModel::State {
  std::shared_ptr<torch::nn::Module> root;
  tape::Forward forward;
  SplitSpec splits;
  std::vector<at::Tensor> inputs;  ///< as they look
  std::map<std::string, std::shared_ptr<const tape::Recording>> recordings;
  std::vector<std::set<std::string>> owned, called;  ///< by stage

  std::string key() const {
    std::string key = tape::mode_of(*root);
    for (const at::Tensor& input : inputs) key += ", " + tape::to_string(tape::form_of(input)) + (input.requires_grad() ? " with gradient" : "");
    return key;
  }

  std::shared_ptr<const tape::Recording> recording() {
    auto& found = recordings[key()];
    if (!found) {
      auto made = std::make_shared<const tape::Recording>(tape::make_recording(*root, forward, inputs, splits, tape::state_of(*root)));
      if (owned.empty()) {
        deal(*made);
      } else {
        check_owners(*made);
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

  void check_owners(const tape::Recording& made) const {
    for (size_t s = 0; s < owned.size(); ++s) {
      for (const int v : made.stages.stages[s].state) {
        const std::string& name = made.graph->values[static_cast<size_t>(v)].name;
        require(owned[s].contains(name), "pipeline: with these inputs and modes (", key(), ") stage ", s, " uses '", name,
                "', which it did not when the model was split; split it in the mode and with the shapes that use all of it");
      }
    }
  }
};

SplitModel::SplitModel(std::shared_ptr<torch::nn::Module> root, tape::Forward forward, std::vector<at::Tensor> example_inputs, SplitSpec splits)
    : state_(std::make_shared<State>()) {
  tape::check_split_points(*root, splits);
  nn::assign_paths(*root);
  state_->root = std::move(root);
  state_->forward = std::move(forward);
  state_->splits = std::move(splits);
  expect(example_inputs);
  state_->recording();
}

int SplitModel::stages() const { return static_cast<int>(state_->splits.size()) + 1; }

std::string SplitModel::to_string() const { return tape::to_string(*recording(), state_->root->name()); }

std::shared_ptr<const tape::Recording> SplitModel::recording() const { return state_->recording(); }

std::shared_ptr<torch::nn::Module> SplitModel::module(int stage) const {
  require(stage >= 0 && stage < stages(), "pipeline: there is no stage ", stage, "; the model has stages 0 to ", stages() - 1);
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

void SplitModel::expect(const std::vector<at::Tensor>& inputs) const {
  std::vector<at::Tensor> looks;
  for (const at::Tensor& input : inputs) looks.push_back(looks_of(input));
  state_->inputs = std::move(looks);
}

void SplitModel::check_agreement(const comm::Group& group) const {
  const auto mine = static_cast<int64_t>(recording()->fingerprint);
  const at::Tensor in = at::empty({1}, at::kLong).fill_(mine), all = at::empty({group.size()}, at::kLong);
  comm::all_gather(group, all, in);
  for (int rank = 0; rank < group.size(); ++rank) {
    require(all.data_ptr<int64_t>()[rank] == all.data_ptr<int64_t>()[0], "pipeline: ranks 0 and ", rank, " of group '", group.name(),
            "' have recorded different graphs of ", state_->root->name(),
            "; build the same model on every rank, give expect() the same shapes, and switch train() and autocast alike");
  }
}

std::vector<at::Tensor> SplitModel::forward(const std::vector<at::Tensor>& inputs) const {
  expect(inputs);
  const auto recording = this->recording();
  std::map<int, at::Tensor> wire;  // by crossing
  std::vector<at::Tensor> outputs;
  for (int s = 0; s < stages(); ++s) {
    const tape::StagePlan& plan = recording->stages.stages[static_cast<size_t>(s)];
    std::vector<at::Tensor> fed, received;
    for (const int input : plan.fed) fed.push_back(inputs[static_cast<size_t>(input)]);
    for (const int c : plan.receives) received.push_back(wire.at(c));
    const tape::StagePass pass(recording, s, fed, received);
    const auto sent = pass.sends();
    for (size_t i = 0; i < sent.size(); ++i) wire[plan.sends[i]] = sent[i];
    outputs = pass.outputs();
  }
  return outputs;
}

}  // namespace tessera
