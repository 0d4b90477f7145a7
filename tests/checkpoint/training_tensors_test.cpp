#include <set>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include "tessera/checkpoint/checkpoint.h"
#include "tessera/checkpoint/deal.h"
#include "tessera/checkpoint/files.h"
#include "tessera/checkpoint/folders.h"
#include "tessera/checkpoint/safetensors.h"
#include "tessera/checkpoint/save_steps.h"
#include "tessera/checkpoint/torch_optimizer.h"
#include "tessera/comm/testing.h"
#include "tessera/core/error.h"
#include "tessera/nn/attach.h"
#include "tessera/nn/cut_parameter.h"
#include "tests/checkpoint/files.h"
#include "tests/checkpoint/layouts.h"

/// Parameters, buffers and optimizer state by name, of our optimizers and of libtorch's, and back.
namespace tessera::checkpoint {
namespace {

using testing::HasSubstr;
using testing::IsEmpty;
using testing::ThrowsMessage;

TEST(Deal, BuffersAreAllOfTheFirstRankThatHoldsThem) {
  std::vector<std::vector<HeldSlice>> held(3);
  for (size_t rank = 0; rank < 3; ++rank) {
    for (int i = 0; i < 6; ++i) held[rank].push_back({Slice::whole("model.w" + std::to_string(i), {8}), "F32", 32});
    for (int i = 0; i < 6; ++i) held[rank].push_back({Slice::whole("buffer.b" + std::to_string(i), {8}), "F32", 32});
    if (rank > 0) held[rank].push_back({Slice::whole("buffer.later", {8}), "F32", 32});
  }
  const auto dealt = deal(held);
  std::vector<std::set<std::string>> buffers(3);
  for (size_t rank = 0; rank < 3; ++rank) {
    for (const size_t i : dealt[rank]) {
      if (held[rank][i].slice.name.starts_with("buffer.")) buffers[rank].insert(held[rank][i].slice.name);
    }
  }
  EXPECT_EQ(buffers[0].size(), 6);
  EXPECT_EQ(buffers[1], std::set<std::string>{"buffer.later"});
  EXPECT_THAT(buffers[2], IsEmpty());
}

struct TiedHead : torch::nn::Module {
  explicit TiedHead(const at::Tensor& weight) { register_parameter("weight", weight); }
};

struct Model : torch::nn::Module {
  Model() {
    const auto linear = register_module("linear", torch::nn::Linear(3, 2));
    register_module("norm", torch::nn::BatchNorm1d(2));
    register_module("tied", std::make_shared<TiedHead>(linear->weight));
  }
};

TEST(TrainingTensors, AreParametersOnceBuffersAndOptimizerState) {
  const Model model;
  OptimConfig config;
  const auto optimizer = optim::make_optimizer(config, nn::unique_parameters(model));
  std::set<std::string> names;
  for (const auto& held : training_tensors(model, optimizer.get())) names.insert(held.slice.name);
  EXPECT_EQ(names.count("model.linear.weight"), 1);
  EXPECT_EQ(names.count("model.tied.weight"), 0);
  EXPECT_EQ(names.count("buffer.norm.running_mean"), 1);
  EXPECT_EQ(names.count("optimizer.exp_avg.linear.weight"), 1);
  EXPECT_EQ(names.count("optimizer.exp_avg_sq.norm.bias"), 1);
  EXPECT_EQ(names.size(), 4 + 3 + 2 * 4);
  EXPECT_EQ(training_tensors(model, nullptr).size(), 4 + 3);
}

TEST(TrainingTensors, OptimizerComesBack) {
  const Model model;
  OptimConfig config;
  const auto saved = optim::make_optimizer(config, nn::unique_parameters(model)), loaded = optim::make_optimizer(config, nn::unique_parameters(model));
  for (const auto& parameter : nn::unique_parameters(model)) at::Tensor(parameter.tensor).mutable_grad() = at::ones_like(parameter.tensor);
  saved->step(0.1);
  restore_optimizer(optimizer_json(*saved), *loaded);
  EXPECT_EQ(loaded->update_counts(), saved->update_counts());
  config.name = "sgd";
  EXPECT_THAT([&] { restore_optimizer(optimizer_json(*saved), *optim::make_optimizer(config, nn::unique_parameters(model))); },
              ThrowsMessage<ConfigError>(HasSubstr("optim.name = sgd: the checkpoint's optimizer is adamw")));
  EXPECT_THROW(restore_optimizer(nlohmann::json(3), *loaded), ConfigError);
}

/// Ranks of which each has a part of the model: how often a part was updated is known on its rank alone.
TEST(TrainingTensors, OfStagesAreThoseOfTheWholeAndBack) {
  const TemporaryFolder folder;
  struct Part : torch::nn::Module {
    explicit Part(const std::vector<std::string>& names) {
      for (const auto& name : names) register_module(name, torch::nn::Linear(3, 3));
    }
  };
  const auto step = [](const torch::nn::Module& model, optim::Optimizer& optimizer) {
    for (const auto& parameter : nn::unique_parameters(model)) at::Tensor(parameter.tensor).mutable_grad() = at::ones_like(parameter.tensor);
    optimizer.step(0.1);
  };
  const std::vector<std::string> names{"first", "second"};
  comm::run_ranks(2, [&](comm::World& world) {
    const Part part({names[static_cast<size_t>(world.rank())]});
    const auto optimizer = optim::make_optimizer(OptimConfig(), nn::unique_parameters(part));
    step(part, *optimizer);
    save(folder.path(), 1, part, *optimizer, world.group());
  });
  const auto saved = *find_latest(folder.path()).folder;
  const Part whole(names);
  const auto optimizer = optim::make_optimizer(OptimConfig(), nn::unique_parameters(whole));
  load(saved, whole, *optimizer);
  for (const auto& [name, count] : optimizer->update_counts()) EXPECT_EQ(count, 1) << name;

  const Part second({"second"});
  const auto of_second = optim::make_optimizer(OptimConfig(), nn::unique_parameters(second));
  EXPECT_THAT([&] { load(saved, second, *of_second); }, ThrowsMessage<ConfigError>(HasSubstr("extra model.first.weight")));
  LoadOptions options;
  for (const auto& [name, stored] : read_manifest(saved).tensors) options.expected.push_back(name);
  load(saved, second, *of_second, options);
  EXPECT_EQ(of_second->update_counts(), (std::map<std::string, int64_t>{{"second.bias", 1}, {"second.weight", 1}}));
  EXPECT_TRUE(at::equal(second.named_parameters()["second.weight"], whole.named_parameters()["second.weight"]));

  const Part more({"first", "second", "third"});
  const auto of_more = optim::make_optimizer(OptimConfig(), nn::unique_parameters(more));
  const at::Tensor before = more.named_parameters()["first.weight"].detach().clone();
  EXPECT_THAT([&] { load(saved, more, *of_more); }, ThrowsMessage<ConfigError>(HasSubstr("third.weight")));
  EXPECT_TRUE(at::equal(more.named_parameters()["first.weight"], before));
}

/// A parameter that was frozen has no state in the checkpoint, and had none to go on with.
TEST(TrainingTensors, GoBackToBeforeAParameterWasTrained) {
  const TemporaryFolder folder;
  const auto step = [](const Model& model, optim::Optimizer& optimizer, int number) {
    for (const auto& parameter : nn::unique_parameters(model)) {
      if (parameter.tensor.requires_grad()) at::Tensor(parameter.tensor).mutable_grad() = at::full_like(parameter.tensor, number);
    }
    optimizer.step(0.1);
  };
  const auto freeze = [](const Model& model, bool frozen) {
    for (const auto& parameter : nn::unique_parameters(model)) {
      if (parameter.name.starts_with("norm")) at::Tensor(parameter.tensor).requires_grad_(!frozen).mutable_grad() = at::Tensor();
    }
  };
  Model model;
  freeze(model, true);
  const auto optimizer = optim::make_optimizer({}, nn::unique_parameters(model));
  step(model, *optimizer, 1);
  const auto saved = save(folder.path(), 1, model, *optimizer, comm::Group::self());
  freeze(model, false);
  step(model, *optimizer, 2);
  std::vector<at::Tensor> once;
  for (const auto& parameter : nn::unique_parameters(model)) once.push_back(parameter.tensor.detach().clone());
  step(model, *optimizer, 3);
  load(saved, model, *optimizer);
  EXPECT_EQ(optimizer->update_counts().at("norm.bias"), 0);
  step(model, *optimizer, 2);
  size_t i = 0;
  for (const auto& parameter : nn::unique_parameters(model)) EXPECT_TRUE(at::equal(parameter.tensor, once[i++])) << parameter.name;

  Model fresh;  // whose optimizer is made before it freezes
  const auto other = optim::make_optimizer({}, nn::unique_parameters(fresh));
  load(saved, fresh, *other);
  EXPECT_EQ(other->update_counts().at("norm.bias"), 0);
}

/// libtorch's parameters() lists a tied one by each of its names.
TEST(TorchOptimizer, TiedParametersAreSavedOnce) {
  const TemporaryFolder folder;
  const Model model;
  ASSERT_EQ(model.parameters().size(), nn::unique_parameters(model).size() + 1);
  torch::optim::Adam optimizer(model.parameters()), resumed(model.parameters());
  for (const auto& parameter : model.parameters()) at::Tensor(parameter).mutable_grad() = at::ones_like(parameter);
  optimizer.step();
  const auto saved = save(folder.path(), 1, model, optimizer, comm::Group::self());
  load(saved, model, resumed);
  EXPECT_EQ(resumed.state().size(), nn::unique_parameters(model).size());
}

/// Gradients of reduce_dtype = kFloat.
TEST(TorchOptimizer, AMomentumThatIsWiderThanItsParameterComesBack) {
  const TemporaryFolder folder;
  torch::nn::Linear model(3, 2);
  model->to(at::kBFloat16);
  const auto options = torch::optim::SGDOptions(0.1).momentum(0.9);
  torch::optim::SGD optimizer(model->parameters(), options), resumed(model->parameters(), options);
  for (const auto& parameter : model->parameters()) {
    auto state = std::make_unique<torch::optim::SGDParamState>();
    state->momentum_buffer(at::full(parameter.sizes(), 1 + 1e-6, at::kFloat));
    optimizer.state()[parameter.unsafeGetTensorImpl()] = std::move(state);
  }
  load(save(folder.path(), 1, *model, optimizer, comm::Group::self()), *model, resumed);
  for (const auto& parameter : model->parameters()) {
    const auto& state = static_cast<torch::optim::SGDParamState&>(*resumed.state().at(parameter.unsafeGetTensorImpl()));
    EXPECT_TRUE(at::equal(state.momentum_buffer(), at::full(parameter.sizes(), 1 + 1e-6, at::kFloat)));
  }
}

/// As optim.state_dtype = bf16 keeps it: in bf16 what libtorch's AdamW multiplies by 0.999 stays as it is.
TEST(TorchOptimizer, StateThatIsNarrowerThanItsParameterIsWidened) {
  const TemporaryFolder folder;
  torch::nn::Linear model(3, 2);
  torch::optim::AdamW optimizer(model->parameters()), resumed(model->parameters());
  for (const auto& parameter : model->parameters()) {
    auto state = std::make_unique<torch::optim::AdamWParamState>();
    state->step(3);
    state->exp_avg(at::full(parameter.sizes(), 0.75, at::kBFloat16));
    state->exp_avg_sq(at::full(parameter.sizes(), 0.5, at::kBFloat16));
    optimizer.state()[parameter.unsafeGetTensorImpl()] = std::move(state);
  }
  const auto report = load(save(folder.path(), 1, *model, optimizer, comm::Group::self()), *model, resumed).report;
  EXPECT_EQ(report.converted.at("optimizer.exp_avg_sq.weight"), "BF16 -> F32");
  for (const auto& parameter : model->parameters()) at::Tensor(parameter).mutable_grad() = at::zeros_like(parameter);
  resumed.step();
  for (const auto& parameter : model->parameters()) {
    const auto& state = static_cast<torch::optim::AdamWParamState&>(*resumed.state().at(parameter.unsafeGetTensorImpl()));
    EXPECT_TRUE(at::allclose(state.exp_avg_sq(), at::full(parameter.sizes(), 0.5 * 0.999))) << state.exp_avg_sq();
    EXPECT_TRUE(at::allclose(state.exp_avg(), at::full(parameter.sizes(), 0.75 * 0.9)));
  }
}

/// Muon's buffer has the name of SGD's.
TEST(TorchOptimizer, StateOfAnotherKindIsNeverTaken) {
  const TemporaryFolder folder;
  const torch::nn::Linear model(3, 2);
  OptimConfig config;
  config.name = "sgd";
  config.momentum = 0.9;
  config.groups = {"weight: name = muon"};
  const auto ours = optim::make_optimizer(config, nn::unique_parameters(*model), optim::whole_model(*model));
  for (const auto& parameter : model->parameters()) at::Tensor(parameter).mutable_grad() = at::ones_like(parameter);
  ours->step(0.1);
  const auto saved = save(folder.path(), 1, *model, *ours, comm::Group::self());
  torch::optim::SGD theirs(model->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
  EXPECT_THAT([&] { load(saved, *model, theirs); }, ThrowsMessage<ConfigError>(HasSubstr("'weight' was updated by muon, and here it is by sgd")));
  load(saved, *model, theirs, {.partial = {"weight"}});
  EXPECT_EQ(theirs.state().count(model->weight.unsafeGetTensorImpl()), 0U);
  EXPECT_EQ(theirs.state().count(model->bias.unsafeGetTensorImpl()), 1U);
  theirs.step();
  ASSERT_EQ(theirs.state().count(model->weight.unsafeGetTensorImpl()), 1U);
  load(saved, *model, theirs, {.partial = {"weight"}});
  EXPECT_EQ(theirs.state().count(model->weight.unsafeGetTensorImpl()), 0U) << "begins anew, also where it has stepped here";
}

/// libtorch keeps nothing of a parameter that was frozen, nor of any with SGD without momentum.
TEST(TorchOptimizer, WhatNothingIsKeptOfCountsFromZeroInOurs) {
  const TemporaryFolder folder;
  const torch::nn::Linear model(3, 2), fresh(3, 2);
  model->bias.requires_grad_(false);
  for (const std::string name : {"adamw", "sgd"}) {
    std::unique_ptr<torch::optim::Optimizer> theirs;
    if (name == "adamw") theirs = std::make_unique<torch::optim::AdamW>(model->parameters(), torch::optim::AdamWOptions(0.1));
    if (name == "sgd") theirs = std::make_unique<torch::optim::SGD>(model->parameters(), torch::optim::SGDOptions(0.1));
    at::Tensor(model->weight).mutable_grad() = at::ones_like(model->weight);
    theirs->step();
    OptimConfig config;
    config.name = name;
    const auto ours = optim::make_optimizer(config, nn::unique_parameters(*fresh));
    for (const auto& parameter : fresh->parameters()) at::Tensor(parameter).mutable_grad() = at::ones_like(parameter);
    ours->step(0.1);
    load(save(folder / name, 1, *model, *theirs, comm::Group::self()), *fresh, *ours);
    EXPECT_EQ(ours->update_counts().at("weight"), name == "adamw" ? 1 : 0);
    EXPECT_EQ(ours->update_counts().at("bias"), 0);
    EXPECT_TRUE(at::equal(fresh->weight, model->weight));
    for (const auto& held : ours->state())
      EXPECT_EQ(held.tensor.count_nonzero().item<int64_t>() > 0, held.parameter == "weight") << held.parameter << held.state;
  }
}

/// The other way round: what ours has not updated is no state that libtorch's needs, and Adagrad's own begins as it does.
TEST(TorchOptimizer, WhatHadNoUpdateIsNotMissed) {
  const TemporaryFolder folder;
  const torch::nn::Linear model(3, 2);
  model->bias.requires_grad_(false);
  OptimConfig config;
  config.name = "sgd";
  config.momentum = 0.9;
  const auto ours = optim::make_optimizer(config, nn::unique_parameters(*model));
  at::Tensor(model->weight).mutable_grad() = at::ones_like(model->weight);
  ours->step(0.1);
  torch::optim::SGD theirs(model->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
  load(save(folder / "ours", 1, *model, *ours, comm::Group::self()), *model, theirs);
  EXPECT_EQ(theirs.state().count(model->weight.unsafeGetTensorImpl()), 1U);
  EXPECT_EQ(theirs.state().count(model->bias.unsafeGetTensorImpl()), 0U);

  const torch::nn::Linear other(2, 1);
  const torch::nn::Sequential both(model, other);
  torch::optim::Adagrad first({model->weight}), wider({model->weight, model->bias});
  torch::optim::AdamW second({model->bias, other->weight}), narrower({other->weight});
  load(save(folder / "both", 1, *both, Optimizers{first, second}, comm::Group::self()), *both, Optimizers{wider, narrower});
  EXPECT_EQ(wider.state().count(model->bias.unsafeGetTensorImpl()), 1U) << "which its next step reads";
}

/// A rate is of the optimizer that had it: a parameter that has moved to another keeps that one's.
TEST(TorchOptimizer, TakesNoRateOfAnotherKind) {
  const TemporaryFolder folder;
  const torch::nn::Linear first(3, 2), second(2, 1);
  const torch::nn::Sequential model(first, second);
  torch::optim::SGD biases({first->bias, second->bias}, torch::optim::SGDOptions(0.1));
  torch::optim::AdamW weights({first->weight, second->weight}, torch::optim::AdamWOptions(0.02));
  const auto saved = save(folder.path(), 1, *model, Optimizers{biases, weights}, comm::Group::self());
  torch::optim::SGD one({second->bias}, torch::optim::SGDOptions(0.3));
  torch::optim::AdamW others({first->bias, first->weight, second->weight}, torch::optim::AdamWOptions(0.5));
  load(saved, *model, Optimizers{one, others});
  EXPECT_EQ(one.param_groups()[0].options().get_lr(), 0.1);
  EXPECT_EQ(others.param_groups()[0].options().get_lr(), 0.02);
}

/// What was trained is the masters; what a program wrote since the last update is as it wrote it, for whoever takes the weights in another type.
TEST(TrainingTensors, OfAnotherTypeFollowWhatWasWrittenSinceTheLastUpdate) {
  const TemporaryFolder folder;
  const at::Tensor master = at::full({2, 3}, 0.3F), written = master.to(at::kHalf);
  written[1].fill_(0.2998F);
  at::Tensor expected = master.clone();
  expected[1].copy_(written[1]);
  ASSERT_FALSE(at::equal(expected, master));
  CheckpointState state;
  state.tensors = {{written, Slice::whole("model.weight", {2, 3})}, {master, Slice::whole("optimizer.master.weight", {2, 3})}};
  state.optimizer = {{"kind", "sgd"}, {"update_counts", {{"weight", 3}}}};
  const auto saved = save(folder.path(), state, comm::Group::self());
  const LoadOptions options{.convert = true};
  OptimConfig config;
  config.name = "sgd";
  torch::nn::Linear wide(torch::nn::LinearOptions(3, 2).bias(false)), alone(torch::nn::LinearOptions(3, 2).bias(false));
  const auto optimizer = optim::make_optimizer(config, nn::unique_parameters(*wide));
  load(saved, *wide, *optimizer, options);
  EXPECT_TRUE(at::equal(wide->weight, expected)) << wide->weight;
  load(saved, *alone, options);
  EXPECT_TRUE(at::equal(alone->weight, expected)) << "a model alone takes the same";

  at::Tensor(wide->weight).data().fill_(7);
  EXPECT_TRUE(load(saved, *wide, *optimizer, {.partial = {"weight"}}).report.fresh.contains("model.weight"));
  EXPECT_TRUE(at::equal(wide->weight, at::full({2, 3}, 7.F))) << "what stays as it was takes nothing of its master";
}

/// A run that compressed its gradients saves what it left behind; whoever wants weights and optimizer state does not have to know of it.
TEST(TrainingTensors, OfARunWithACommunicationHookAreRead) {
  const TemporaryFolder folder;
  const Model model;
  const auto optimizer = optim::make_optimizer(OptimConfig{}, nn::unique_parameters(model));
  for (const auto& parameter : nn::unique_parameters(model)) at::Tensor(parameter.tensor).mutable_grad() = at::ones_like(parameter.tensor);
  optimizer->step(0.1);
  CheckpointState state{.step = 1, .optimizer = optimizer_json(*optimizer)};
  add_training_tensors(state, model, *optimizer);
  state.tensors.push_back({at::ones({2, 3}), Slice::whole("hook.powersgd.error.linear.weight", {2, 3})});
  const auto saved = save(folder.path(), state, comm::Group::self());
  const auto expect_read = [&](const auto& load_into) {
    const Model other;
    load_into(other);
    EXPECT_TRUE(at::equal(other.named_parameters()["linear.weight"], model.named_parameters()["linear.weight"]));
  };
  expect_read([&](const Model& other) { load(saved, other); });
  expect_read([&](const Model& other) { load(saved, other, *optim::make_optimizer(OptimConfig{}, nn::unique_parameters(other))); });
  expect_read([&](const Model& other) {
    torch::optim::AdamW theirs(other.parameters());
    load(saved, other, theirs);
  });
}

}  // namespace
}  // namespace tessera::checkpoint
