#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/linear.h>

#include "tessera/checkpoint/torch_optimizer.h"
#include "tessera/core/error.h"
#include "tessera/nn/parameter.h"
#include "tessera/optim/adamw.h"
#include "tests/checkpoint/files.h"
#include "tests/checkpoint/layouts.h"

/// LoadOptions::partial, and how much a load reads.
namespace tessera::checkpoint {
namespace {

using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::Not;
using testing::ThrowsMessage;

SlicedTensor whole(const std::string& name, const at::Tensor& values) { return {values, Slice::whole(name, values.sizes().vec())}; }

class Partial : public testing::Test {
 protected:
  Partial() {
    CheckpointState state;
    state.tensors = {whole("model.body.weight", at::full({4}, 2.0f)), whole("optimizer.exp_avg.body.weight", at::full({4}, 3.0f)),
                     whole("model.head.weight", at::full({5}, 4.0f)), whole("optimizer.exp_avg.head.weight", at::full({5}, 5.0f))};
    checkpoint_ = save(folder_.path(), state, comm::Group::self());
  }

  LoadReport load_into(const std::vector<SlicedTensor>& targets, std::vector<std::string> partial) const {
    return load(checkpoint_, read_manifest(checkpoint_), targets, {.partial = std::move(partial)});
  }

  TemporaryFolder folder_;
  std::filesystem::path checkpoint_;
};

TEST_F(Partial, OnlyWhatIsListedMayDiffer) {
  const std::vector<SlicedTensor> targets{whole("model.body.weight", at::zeros({4})), whole("optimizer.exp_avg.body.weight", at::zeros({4})),
                                          whole("model.head.weight", at::zeros({7})), whole("optimizer.exp_avg.head.weight", at::zeros({7})),
                                          whole("model.extra.bias", at::zeros({2}))};
  EXPECT_THAT([&] { load_into(targets, {}); },
              ThrowsMessage<ConfigError>(AllOf(HasSubstr("shape of model.head.weight"), HasSubstr("missing model.extra.bias"), Not(HasSubstr("body")))));
  EXPECT_THAT([&] { load_into(targets, {"head.*"}); }, ThrowsMessage<ConfigError>(AllOf(HasSubstr("missing model.extra.bias"), Not(HasSubstr("head")))));
  const auto report = load_into(targets, {"head.*", "extra.bias"});
  EXPECT_THAT(report.fresh, ElementsAre("model.extra.bias", "model.head.weight", "optimizer.exp_avg.head.weight"));
  EXPECT_TRUE(report.unread.empty());
  EXPECT_TRUE(targets[0].tensor.eq(2).all().item<bool>());
  EXPECT_TRUE(targets[2].tensor.eq(0).all().item<bool>()) << "left as it was";
}

TEST_F(Partial, WhatTheModelLacksIsLeftUnread) {
  const std::vector<SlicedTensor> targets{whole("model.body.weight", at::zeros({4})), whole("optimizer.exp_avg.body.weight", at::zeros({4}))};
  EXPECT_THAT([&] { load_into(targets, {}); }, ThrowsMessage<ConfigError>(HasSubstr("extra model.head.weight")));
  EXPECT_THAT(load_into(targets, {"head.**"}).unread, ElementsAre("model.head.weight", "optimizer.exp_avg.head.weight"));
}

TEST_F(Partial, APatternThatMatchesNothingIsRefused) {
  const std::vector<SlicedTensor> targets{whole("model.body.weight", at::zeros({4})), whole("optimizer.exp_avg.body.weight", at::zeros({4})),
                                          whole("model.head.weight", at::zeros({5})), whole("optimizer.exp_avg.head.weight", at::zeros({5}))};
  EXPECT_THAT([&] { load_into(targets, {"haed.*"}); }, ThrowsMessage<ConfigError>(HasSubstr("checkpoint.partial = haed.* matches no tensor")));
  EXPECT_TRUE(load_into(targets, {"head.*"}).fresh.empty()) << "what fits is loaded";
  EXPECT_TRUE(targets[2].tensor.eq(4).all().item<bool>());
}

TEST(RestoreOptimizer, AFreshParameterCountsFromZero) {
  const torch::nn::Linear model(3, 2);
  const auto optimizer = optim::make_optimizer(OptimConfig{}, nn::unique_parameters(*model));
  auto saved = optimizer_json(*optimizer);
  saved["update_counts"] = {{"weight", 7}, {"gone", 7}};
  LoadReport loaded;
  loaded.fresh = {"model.bias", "optimizer.exp_avg.bias"};
  EXPECT_THROW(restore_optimizer(saved, *optimizer, loaded), ConfigError);
  loaded.unread = {"model.gone"};
  restore_optimizer(saved, *optimizer, loaded);
  EXPECT_EQ(optimizer->update_counts(), (std::map<std::string, int64_t>{{"weight", 7}, {"bias", 0}}));
}

TEST(Load, ReadsEachByteOnceOverAllRanksWhereTheLayoutIsTheSame) {
  const TemporaryFolder folder;
  for (const int ranks : {1, 2, 3}) {
    const auto checkpoint = save_with(Layout::Rows, ranks, folder.path());
    const Manifest manifest = read_manifest(checkpoint);
    uint64_t stored = 0, read = 0, replicated = 0;
    for (const auto& [name, tensor] : logical_tensors()) {
      stored += tensor.nbytes();
      if (tensor.dim() == 0) replicated += tensor.nbytes();
    }
    for (int rank = 0; rank < ranks; ++rank) read += load(checkpoint, manifest, local_tensors(Layout::Rows, ranks, rank, false)).read_bytes;
    EXPECT_EQ(read, stored + replicated * (ranks - 1)) << ranks;
    const auto all = load(checkpoint, manifest, local_tensors(Layout::Replicated, 1, 0, false)).read_bytes;
    EXPECT_EQ(all, stored) << "one rank of one reads all";
  }
}

/// A model of which a part is frozen, and an optimizer that keeps state of the rest.
struct Staged {
  explicit Staged(bool frozen) {
    model.register_module("body", torch::nn::Linear(3, 2));
    model.register_module("head", torch::nn::Linear(2, 2));
    if (frozen) freeze(true);
    optimizer = std::make_unique<optim::AdamW>(optim::decay_groups(nn::unique_parameters(model), "all", 0.1));
  }
  void freeze(bool frozen) {
    for (auto& item : model.named_parameters()) {
      if (item.key().starts_with("body")) item.value().requires_grad_(!frozen);
    }
  }
  void step() {
    for (auto& parameter : model.parameters()) parameter.mutable_grad() = parameter.requires_grad() ? at::ones_like(parameter).detach() : at::Tensor();
    optimizer->step(0.1);
  }
  torch::nn::Module model{"Staged"};
  std::unique_ptr<optim::Optimizer> optimizer;
};

/// Of two parts of a net, one is trained by one optimizer and the other by the next, which has no past but what the checkpoint has of its parameters.
TEST(PartialLoad, AnOptimizerOfOtherParametersTakesWhatThereIsOfItsOwn) {
  const TemporaryFolder folder;
  for (const std::string name : {"adamw", "sgd"}) {
    const auto make = [&](const torch::nn::Module& model, const std::string& part) {
      OptimConfig config;
      config.name = name;
      auto parameters = nn::unique_parameters(model);
      std::erase_if(parameters, [&](const auto& parameter) { return !parameter.name.starts_with(part); });
      return optim::make_optimizer(config, parameters);
    };
    const auto step = [](torch::nn::Module& model, optim::Optimizer& optimizer) {
      for (auto& parameter : model.parameters()) parameter.mutable_grad() = at::ones_like(parameter).detach();
      optimizer.step(0.1);
    };
    Staged saved(/*frozen=*/false);
    const auto all = make(saved.model, "");
    step(saved.model, *all);
    const auto checkpoint = save(folder / name, 1, saved.model, *all, comm::Group::self());

    Staged other(/*frozen=*/false);
    const auto head = make(other.model, "head");
    const at::Tensor before = other.model.parameters()[0].detach().clone();
    EXPECT_THROW(load(checkpoint, other.model, *head), ConfigError);
    EXPECT_TRUE(at::equal(other.model.parameters()[0], before)) << "refused before anything is touched";
    load(checkpoint, other.model, *head, {.partial = {"body.**"}});
    EXPECT_EQ(head->update_counts(), (std::map<std::string, int64_t>{{"head.bias", 1}, {"head.weight", 1}}));
    step(saved.model, *all);
    step(other.model, *head);
    EXPECT_TRUE(at::equal(saved.model.named_parameters()["head.weight"], other.model.named_parameters()["head.weight"])) << name;

    torch::nn::Module shorter("Shorter");
    shorter.register_module("head", torch::nn::Linear(2, 2));
    const auto the_head = make(shorter, "");
    load(checkpoint, shorter, *the_head, {.ignore_prefixes = {"model.body.", "optimizer.exp_avg.body.", "optimizer.exp_avg_sq.body."}});
    EXPECT_EQ(the_head->update_counts(), (std::map<std::string, int64_t>{{"head.bias", 1}, {"head.weight", 1}})) << "of what stays unread nobody counts";

    const auto of_head = save(folder / (name + " of the head"), 2, other.model, *head, comm::Group::self());
    Staged more(/*frozen=*/false);
    const auto both = make(more.model, "");
    load(of_head, more.model, *both, {.partial = {"body.**"}});
    EXPECT_EQ(both->update_counts().at("body.weight"), 0);
    EXPECT_EQ(both->update_counts().at("head.weight"), 2);
  }
}

TEST(FrozenState, ComesAndGoesWithCheckpoints) {
  for (const bool frozen_there : {true, false}) {
    for (const bool unfrozen_later : {true, false}) {
      for (const bool frozen_here : {true, false}) {
        const TemporaryFolder folder;
        Staged saved(frozen_there);
        saved.step();
        if (unfrozen_later) saved.freeze(false);
        saved.step();
        CheckpointState state;
        state.tensors = training_tensors(saved.model, saved.optimizer.get());
        state.optimizer = optimizer_json(*saved.optimizer);
        const auto checkpoint = save(folder.path(), state, comm::Group::self());

        Staged resumed(frozen_here);
        const Manifest manifest = read_manifest(checkpoint);
        const auto loaded = load(checkpoint, manifest, training_tensors(resumed.model, *resumed.optimizer, manifest));
        restore_optimizer(manifest.optimizer, *resumed.optimizer, loaded);
        saved.freeze(false), resumed.freeze(false);
        saved.step(), resumed.step();
        for (size_t i = 0; i < saved.model.parameters().size(); ++i) EXPECT_TRUE(at::equal(saved.model.parameters()[i], resumed.model.parameters()[i])) << i;
      }
    }
  }
}

/// SGD's momentum and Muon's have one name, and are no state of each other.
TEST(PartialLoad, StateOfAnotherKindIsNeverTaken) {
  const TemporaryFolder folder;
  const auto make = [](const torch::nn::Module& model, const std::string& settings) {
    OptimConfig config;
    config.groups = {"body.weight: name = " + settings};
    return optim::make_optimizer(config, nn::unique_parameters(model), optim::whole_model(model));
  };
  const std::vector<std::string> kinds{"sgd, momentum = 0.9", "muon"};
  for (const std::string& kind : kinds) {
    const std::string& other = kind == kinds[0] ? kinds[1] : kinds[0];
    Staged saved(/*frozen=*/false);
    saved.optimizer = make(saved.model, kind);
    saved.step();
    const auto checkpoint = save(folder / kind, 1, saved.model, *saved.optimizer, comm::Group::self());

    Staged resumed(/*frozen=*/false);
    resumed.optimizer = make(resumed.model, other);
    const at::Tensor before = resumed.model.parameters()[0].detach().clone();
    EXPECT_THAT([&] { load(checkpoint, resumed.model, *resumed.optimizer); },
                ThrowsMessage<ConfigError>(
                    AllOf(HasSubstr("optim.groups: 'body.weight' is updated by " + other.substr(0, other.find(','))), HasSubstr("checkpoint.partial"))));
    EXPECT_TRUE(at::equal(resumed.model.parameters()[0], before)) << "refused before anything is touched";
    load(checkpoint, resumed.model, *resumed.optimizer, {.partial = {"body.*"}});
    EXPECT_TRUE(at::equal(resumed.model.named_parameters()["body.weight"], saved.model.named_parameters()["body.weight"])) << "the weights are";
    EXPECT_EQ(resumed.optimizer->update_counts().at("body.weight"), 0);
    EXPECT_EQ(resumed.optimizer->update_counts().at("head.weight"), 1);
    for (const auto& held : resumed.optimizer->state()) {
      if (held.parameter == "body.weight") EXPECT_FALSE(held.tensor.any().item<bool>()) << held.state;
      if (held.parameter == "head.weight") EXPECT_TRUE(held.tensor.any().item<bool>()) << held.state;
    }

    Manifest older = read_manifest(checkpoint);
    older.optimizer.erase("kinds");
    Staged again(/*frozen=*/false);
    again.optimizer = make(again.model, kind);
    const auto loaded = load(checkpoint, older, training_tensors(again.model, *again.optimizer, older));
    restore_optimizer(older.optimizer, *again.optimizer, loaded);
    EXPECT_EQ(again.optimizer->update_counts().at("body.weight"), 1) << "one that says nothing of kinds";
  }
}

}  // namespace
}  // namespace tessera::checkpoint
