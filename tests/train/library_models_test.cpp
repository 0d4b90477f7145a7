#include "tests/train/library_models.h"

#include <map>
#include <mutex>

#include <gtest/gtest.h>
#include <torch/optim/sgd.h>

#include "tessera/checkpoint/torch_optimizer.h"
#include "tessera/comm/testing.h"
#include "tessera/data_parallel/distributed_data_parallel.h"
#include "tessera/data_parallel/tree_reduction.h"
#include "tessera/fsdp/fully_shard.h"
#include "tessera/mesh/mesh.h"
#include "tessera/nn/attach.h"
#include "tessera/nn/dropout.h"
#include "tessera/nn/sample_scope.h"
#include "tessera/optim/clip_grad_norm.h"
#include "tessera/zero/sharded_data_parallel.h"
#include "tessera/zero/zero_optimizer.h"
#include "tests/checkpoint/files.h"
#include "tests/nn/net.h"

/// Programs written for libtorch, in their own loop, on several ranks under every wrapper, against one process that takes the same micro-batches.
namespace tessera {
namespace {

using namespace testing_support;
using comm::run_ranks;
using comm::World;

constexpr int64_t kModelBatch = 12;
constexpr int kSteps = 4;

struct Outcome {
  std::vector<double> losses;
  std::vector<at::Tensor> weights;  ///< whole
  at::Tensor evaluated;             ///< of the whole batch of step 0
};

/// What a program is given: everything else of its loop is its own.
struct Session {
  torch::nn::Module& model;
  std::function<void()> zero_grad, step;
  std::function<Attachment()> no_sync;
  std::function<void()> restart;  ///< save, forget everything, load
  int rank = 0, ranks = 1;
};

void freeze(const torch::nn::Module& model, int which) {
  int i = 0;
  for (const at::Tensor& parameter : model.parameters()) at::Tensor(parameter).requires_grad_(i++ % 3 != which);
}

/// Losses of the rank's own parts. `passes` micro-batches a rank and step; one process takes those of all ranks.
std::vector<double> train(const LibraryModel& model, const std::function<Session&()>& session, const std::string& mode, int parts) {
  std::vector<double> losses;
  for (int step = 0; step < kSteps; ++step) {
    if (mode == "frozen" && step == 2) freeze(session().model, 1);
    if (mode == "frozen" && step == 3) freeze(session().model, -1);
    if (mode == "saved" && step == 2) {
      const auto restart = session().restart;  // which makes another session
      restart();
    }
    Session& now = session();
    const auto [x, y] = model.batch(kModelBatch, step);
    const int mine = parts / now.ranks;
    double total = 0;
    now.zero_grad();
    for (int pass = 0; pass < mine; ++pass) {
      const auto held = pass + 1 < mine ? now.no_sync() : Attachment();
      const auto [begin, size] = chunk(kModelBatch, parts, now.rank * mine + pass);
      const nn::SampleScope samples({.seed = 7, .step = step + 1, .first_sample = begin});
      const at::Tensor loss = library_loss(model.forward(now.model, x.narrow(0, begin, size)), y.narrow(0, begin, size), y.numel());
      loss.backward();
      total += loss.item<double>();
    }
    clip_grad_norm(now.model, 0.5);
    now.step();
    losses.push_back(total);
  }
  return losses;
}

std::unique_ptr<torch::optim::SGD> sgd_of(const std::vector<at::Tensor>& parameters) {
  return std::make_unique<torch::optim::SGD>(parameters, torch::optim::SGDOptions(0.1).momentum(0.9));
}

at::Tensor evaluate(const LibraryModel& model, torch::nn::Module& module) {
  const at::NoGradGuard no_grad;
  module.eval();
  at::Tensor out = model.forward(module, model.batch(kModelBatch, 0).first).clone();
  module.train();
  return out;
}

Outcome one_process(const std::string& name, const std::string& mode, int parts) {
  const LibraryModel model = library_model(name);
  const auto module = model.make();
  nn::assign_paths(*module);
  fill_parameters(*module);
  if (mode == "frozen") freeze(*module, 0);
  const auto optimizer = sgd_of(module->parameters());
  Session session{.model = *module,
                  .zero_grad = [&] { optimizer->zero_grad(); },
                  .step = [&] { optimizer->step(); },
                  .no_sync = [] { return Attachment(); },
                  .restart = [] {}};
  Outcome outcome;
  outcome.losses = train(model, [&]() -> Session& { return session; }, mode, parts);
  for (const at::Tensor& parameter : module->parameters()) outcome.weights.push_back(parameter.detach().clone());
  outcome.evaluated = evaluate(model, *module);
  return outcome;
}

/// One rank: the wrapper and its optimizer, made anew by a restart.
class Rank {
 public:
  Rank(const std::string& name, const std::string& wrapper, const std::string& mode, World& world, std::filesystem::path folder)
      : model_(library_model(name)), wrapper_(wrapper), world_(world), folder_(std::move(folder)) {
    build(mode == "frozen");
  }

  Session& session() { return *session_; }

  Outcome finish(std::vector<double> losses) {
    Outcome outcome{.losses = std::move(losses), .evaluated = evaluate(model_, *module_)};
    if (wrapper_.starts_with("fsdp")) unshard(*module_);
    for (const at::Tensor& parameter : module_->parameters()) outcome.weights.push_back(parameter.detach().clone());
    return outcome;
  }

 private:
  using Optimizer = ZeroOptimizer<torch::optim::SGD>;

  void build(bool frozen) {
    optimizer_.reset();
    synchronizer_.reset();
    module_ = model_.make();
    nn::assign_paths(*module_);
    fill_parameters(*module_);
    if (frozen) freeze(*module_, 0);
    const auto group = world_.group();
    if (wrapper_ == "ddp") synchronizer_ = std::make_unique<DistributedDataParallel>(*module_, group);
    if (wrapper_ == "zero1") synchronizer_ = std::make_unique<ShardedDataParallel>(*module_, ShardGroups{.shard = group}, ZeroOptions{.stage = 1});
    if (wrapper_ == "zero2") synchronizer_ = std::make_unique<ShardedDataParallel>(*module_, ShardGroups{.shard = group}, ZeroOptions{.stage = 2});
    if (wrapper_ == "fsdp") synchronizer_ = fully_shard(*module_, group, {.trigger = ShardTrigger::Operators});
    if (wrapper_ == "fsdp_units") synchronizer_ = fully_shard(*module_, group, {.wrap = model_.wrap});  // by calls where all modules are of ours
    optimizer_ = std::make_unique<Optimizer>(zero_optimizer(*synchronizer_, sgd_of));
    session_ = std::make_unique<Session>(Session{.model = *module_,
                                                 .zero_grad = [this] { optimizer_->zero_grad(); },
                                                 .step = [this] { optimizer_->step(); },
                                                 .no_sync = [this] { return synchronizer_->no_sync(); },
                                                 .restart = [this] { restart(); },
                                                 .rank = world_.rank(),
                                                 .ranks = world_.size()});
  }

  void restart() {
    const auto saved = checkpoint::save(folder_, 2, *module_, optimizer_->inner(), world_.group());
    build(false);
    checkpoint::load(saved, *module_, optimizer_->inner());
  }

  LibraryModel model_;
  std::string wrapper_;
  World& world_;
  std::filesystem::path folder_;
  std::shared_ptr<torch::nn::Module> module_;
  std::unique_ptr<GradientSynchronizer> synchronizer_;
  std::unique_ptr<Optimizer> optimizer_;
  std::unique_ptr<Session> session_;
};

class LibraryModels : public ::testing::TestWithParam<std::tuple<std::string, std::string>> {};
INSTANTIATE_TEST_SUITE_P(PlainLoop, LibraryModels,
                         ::testing::Combine(::testing::Values("resnet", "lstm", "digits", "gpt", "encoder", "ours"),
                                            ::testing::Values("ddp", "zero1", "zero2", "fsdp", "fsdp_units")),
                         [](const auto& info) { return std::get<0>(info.param) + "_" + std::get<1>(info.param); });

void expect_parity(const std::string& name, const std::string& wrapper, const std::string& mode, const std::vector<int>& sizes) {
  SCOPED_TRACE(mode);
  const LibraryModel model = library_model(name);
  const checkpoint::TemporaryFolder folder;
  for (const int ranks : sizes) {
    const int parts = ranks * (mode == "accumulated" ? 2 : 1);
    const Outcome expected = one_process(name, mode, parts);
    std::vector<Outcome> outcomes(static_cast<size_t>(ranks));
    run_ranks(ranks, [&](World& world) {
      Rank rank(name, wrapper, mode, world, folder / std::to_string(ranks));
      auto losses = train(model, [&]() -> Session& { return rank.session(); }, mode, parts);
      outcomes[static_cast<size_t>(world.rank())] = rank.finish(std::move(losses));
    });
    for (int step = 0; step < kSteps; ++step) {
      double loss = 0;
      for (const Outcome& outcome : outcomes) loss += outcome.losses[static_cast<size_t>(step)];
      EXPECT_NEAR(loss, expected.losses[static_cast<size_t>(step)], 5e-6 * expected.losses[static_cast<size_t>(step)]) << ranks << " ranks, step " << step;
    }
    for (const Outcome& outcome : outcomes) {
      EXPECT_LT(largest_difference(outcome.weights, expected.weights), 1e-4) << ranks << " ranks";
      EXPECT_TRUE(at::equal(outcome.evaluated, outcomes[0].evaluated)) << ranks << " ranks";
      if (name != "resnet") {
        EXPECT_TRUE(at::allclose(outcome.evaluated, expected.evaluated, 1e-4, 1e-5)) << ranks << " ranks";
      }
    }
  }
}

TEST_P(LibraryModels, RunOnManyRanksAsOnOne) {
  const auto& [name, wrapper] = GetParam();
  expect_parity(name, wrapper, "plain", {1, 3});
  expect_parity(name, wrapper, "accumulated", {2});
  expect_parity(name, wrapper, "frozen", {3});
  expect_parity(name, wrapper, "saved", {2});
}

/// Images from noise, and a judge of them: two models, two optimizers, two backward passes through one of them.
struct Adversaries {
  torch::nn::Sequential generator{torch::nn::ConvTranspose2d(torch::nn::ConvTranspose2dOptions(5, 4, 3).bias(false)), torch::nn::BatchNorm2d(4),
                                  torch::nn::ReLU(), torch::nn::ConvTranspose2d(torch::nn::ConvTranspose2dOptions(4, 1, 4).stride(2).padding(1).bias(false)),
                                  torch::nn::Tanh()};
  torch::nn::Sequential judge{torch::nn::Conv2d(torch::nn::Conv2dOptions(1, 4, 4).stride(2).padding(1).bias(false)),
                              torch::nn::LeakyReLU(torch::nn::LeakyReLUOptions().negative_slope(0.2)),
                              torch::nn::Conv2d(torch::nn::Conv2dOptions(4, 1, 3).bias(false)), torch::nn::Sigmoid()};
  Adversaries() {
    fill_parameters(*generator, 1);
    fill_parameters(*judge, 2);
  }
};

/// The loop of PyTorch's example.
template <class Optimizer>
std::vector<double> play(Adversaries& models, Optimizer& of_generator, Optimizer& of_judge, int parts, int first, int count) {
  std::vector<double> losses;
  const auto loss_of = [&](const at::Tensor& judged, double label) {
    return at::binary_cross_entropy(judged, at::full_like(judged, label), {}, at::Reduction::Sum) / static_cast<double>(kModelBatch);
  };
  for (int step = 0; step < 3; ++step) {
    const auto each = [&](auto&& run) {
      for (int part = first; part < first + count; ++part) {
        const auto [begin, size] = chunk(kModelBatch, parts, part);
        run(numbers({kModelBatch, 1, 6, 6}, "real" + std::to_string(step)).narrow(0, begin, size),
            models.generator->forward(numbers({kModelBatch, 5, 1, 1}, "noise" + std::to_string(step)).narrow(0, begin, size)));
      }
    };
    double total = 0;
    of_judge.zero_grad();
    each([&](const at::Tensor& real, const at::Tensor& fake) {
      const at::Tensor for_real = loss_of(models.judge->forward(real), 1);
      for_real.backward();
      const at::Tensor for_fake = loss_of(models.judge->forward(fake.detach()), 0);
      for_fake.backward();
      total += for_real.template item<double>() + for_fake.template item<double>();
    });
    of_judge.step();
    of_generator.zero_grad();
    each([&](const at::Tensor&, const at::Tensor& fake) {
      const at::Tensor fooled = loss_of(models.judge->forward(fake), 1);
      fooled.backward();
      total += fooled.template item<double>();
    });
    of_generator.step();
    losses.push_back(total);
  }
  return losses;
}

struct Dropping : torch::nn::Module {
  Dropping() {
    register_module("linear", linear);
    register_module("dropout", dropout);
    fill_parameters(*this);
  }
  torch::nn::Linear linear{4, 4};
  nn::Dropout dropout{0.5};
};

TEST(LibraryModels, RanksOfEveryWrapperDropApartThoughTheyAreSeededAlike) {
  for (const std::string wrapper : {"ddp", "zero", "fsdp", "tree"}) {
    std::mutex one_at_a_time;  // ranks are threads, and share libtorch's generator
    std::vector<at::Tensor> dropped(2);
    run_ranks(2, [&](World& world) {
      Dropping model;
      std::unique_ptr<GradientSynchronizer> wrapped;
      if (wrapper == "ddp") wrapped = std::make_unique<DistributedDataParallel>(model, world.group());
      if (wrapper == "zero") wrapped = std::make_unique<ShardedDataParallel>(model, ShardGroups{.shard = world.group()});
      if (wrapper == "fsdp") wrapped = fully_shard(model, world.group());
      if (wrapper == "tree") wrapped = std::make_unique<TreeReduction>(model, world.group(), TreeReductionOptions{.num_micro_batches = 2});
      EXPECT_EQ(model.dropout->path(), "dropout");
      const std::lock_guard lock(one_at_a_time);
      torch::manual_seed(3);
      dropped[static_cast<size_t>(world.rank())] = model.dropout(at::ones({4, 32}));
    });
    EXPECT_FALSE(at::equal(dropped[0], dropped[1])) << wrapper;
  }
}

/// A wrapper over fewer ranks, as tensor parallelism beside it has them, has the word when the one before has gone, if that went after it came.
TEST(LibraryModels, RanksOfTheNextLayoutDropAlikeWhereTheyShareSamples) {
  for (const std::string before : {"ddp", "unsharded"}) {
    std::mutex one_at_a_time;
    std::vector<at::Tensor> dropped(4);
    run_ranks(4, [&](World& world) {
      const Mesh mesh(world, {{"dp", 2}, {"tp", 2}});
      Dropping model;
      std::unique_ptr<GradientSynchronizer> wrapped;
      if (before == "ddp") wrapped = std::make_unique<DistributedDataParallel>(model, world.group());
      const auto sharded = before == "unsharded" ? fully_shard(model, world.group()) : nullptr;
      if (sharded) unshard(model);
      wrapped = std::make_unique<DistributedDataParallel>(model, mesh["dp"]);
      const std::lock_guard lock(one_at_a_time);
      torch::manual_seed(3);
      dropped[static_cast<size_t>(world.rank())] = model.dropout(at::ones({4, 32}));
    });
    EXPECT_TRUE(at::equal(dropped[0], dropped[1]) && at::equal(dropped[2], dropped[3])) << before;
    EXPECT_FALSE(at::equal(dropped[0], dropped[2])) << before;
  }
}

/// Values that a program puts in the place of slices are slices, for who saves and clips before the next forward, too.
TEST(LibraryModels, WhatWasPutInThePlaceOfSlicesIsSavedAndClipped) {
  const checkpoint::TemporaryFolder folder;
  torch::nn::Linear whole(4, 5);
  fill_parameters(*whole);
  const at::Tensor x = at::ones({2, 4});
  whole->forward(x).pow(2).sum().backward();
  const double norm = clip_grad_norm(*whole, 1e9).item<double>();
  for (const int ranks : {2, 3}) {
    run_ranks(ranks, [&](World& world) {
      torch::nn::Linear model(4, 5);
      fill_parameters(*model);
      const auto sharded = fully_shard(model, world.group(), {.average = true});
      model->forward(x).pow(2).sum().backward();
      model->weight.set_data(model->weight.detach() * 2);
      EXPECT_NEAR(clip_grad_norm(*model, 1e9).item<double>(), norm, 1e-5 * norm);
      model->bias.set_data(model->bias.detach() * 2);
      const auto saved = checkpoint::save(folder.path(), ranks, *model, world.group());
      if (world.rank() != 0) return;
      torch::nn::Linear back(4, 5);
      checkpoint::load(saved, *back);
      EXPECT_TRUE(at::equal(back->weight, whole->weight * 2));
      EXPECT_TRUE(at::equal(back->bias, whole->bias * 2));
    });
  }
}

class AdversarialModels : public ::testing::TestWithParam<std::string> {};
INSTANTIATE_TEST_SUITE_P(PlainLoop, AdversarialModels, ::testing::Values("ddp", "zero1", "zero2", "fsdp"), [](const auto& info) { return info.param; });

TEST_P(AdversarialModels, RunOnManyRanksAsOnOne) {
  for (const int ranks : {1, 2, 3}) {
    Adversaries whole;
    auto generator = sgd_of(whole.generator->parameters()), judge = sgd_of(whole.judge->parameters());
    const auto expected = play(whole, *generator, *judge, ranks, 0, ranks);
    std::vector<std::vector<double>> losses(static_cast<size_t>(ranks));
    run_ranks(ranks, [&](World& world) {
      Adversaries models;
      const auto wrap = [&](torch::nn::Module& module) -> std::unique_ptr<GradientSynchronizer> {
        if (GetParam() == "ddp") return std::make_unique<DistributedDataParallel>(module, world.group());
        if (GetParam() == "fsdp") return fully_shard(module, world.group());
        return std::make_unique<ShardedDataParallel>(module, ShardGroups{.shard = world.group()}, ZeroOptions{.stage = GetParam() == "zero1" ? 1 : 2});
      };
      const auto around_generator = wrap(*models.generator), around_judge = wrap(*models.judge);
      auto of_generator = zero_optimizer(*around_generator, sgd_of), of_judge = zero_optimizer(*around_judge, sgd_of);
      losses[static_cast<size_t>(world.rank())] = play(models, of_generator, of_judge, ranks, world.rank(), 1);
    });
    for (size_t step = 0; step < expected.size(); ++step) {
      double loss = 0;
      for (const auto& mine : losses) loss += mine[step];
      EXPECT_NEAR(loss, expected[step], 5e-6 * expected[step]) << ranks << " ranks, step " << step;
    }
  }
}

}  // namespace
}  // namespace tessera
