#include "tessera/checkpoint/torch_optimizer.h"

#include <functional>
#include <limits>
#include <map>
#include <memory>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/optim.h>

#include "tessera/comm/testing.h"
#include "tessera/core/error.h"
#include "tessera/data_parallel/distributed_data_parallel.h"
#include "tessera/fsdp/fully_shard.h"
#include "tessera/nn/attach.h"
#include "tessera/nn/meta.h"
#include "tessera/optim/adamw.h"
#include "tessera/precision/master_weights.h"
#include "tessera/zero/sharded_data_parallel.h"
#include "tests/checkpoint/files.h"
#include "tests/nn/net.h"
#include "tests/test_device.h"

namespace tessera {
namespace {

using namespace testing_support;
using checkpoint::SlicedTensor;
using comm::run_ranks;
using comm::World;
using ::testing::HasSubstr;

using TorchOptimizer = std::unique_ptr<torch::optim::Optimizer>;
using Make = std::function<TorchOptimizer(std::vector<at::Tensor>)>;

const std::map<std::string, Make> kinds{
    {"adam", [](auto p) { return std::make_unique<torch::optim::Adam>(p, torch::optim::AdamOptions(0.01).amsgrad(true)); }},
    {"adamw", [](auto p) { return std::make_unique<torch::optim::AdamW>(p, torch::optim::AdamWOptions(0.01)); }},
    {"sgd", [](auto p) { return std::make_unique<torch::optim::SGD>(p, torch::optim::SGDOptions(0.02).momentum(0.9)); }},
    {"sgd_plain", [](auto p) { return std::make_unique<torch::optim::SGD>(p, torch::optim::SGDOptions(0.02)); }},
    {"adagrad", [](auto p) { return std::make_unique<torch::optim::Adagrad>(p, torch::optim::AdagradOptions(0.02).lr_decay(0.1)); }},
    {"rmsprop", [](auto p) { return std::make_unique<torch::optim::RMSprop>(p, torch::optim::RMSpropOptions(0.005).momentum(0.5).centered(true)); }},
};

constexpr int64_t kTrainSamples = 12;

/// One rank of a run: the net, wrapped, and an optimizer of libtorch over what the rank updates.
struct TorchRun {
  TorchRun(const std::string& wrapper, World& world, const std::string& kind) : ranks(world.size()), rank(world.rank()) {
    nn::assign_paths(*net);
    auto parameters = net->parameters();
    if (wrapper == "ddp") ddp = std::make_unique<DistributedDataParallel>(*net, world.group());
    if (wrapper == "fsdp") fsdp = fully_shard(*net, world.group());
    if (wrapper.starts_with("zero")) {
      zero = std::make_unique<ShardedDataParallel>(*net, ShardGroups{.shard = world.group()}, ZeroOptions{.stage = wrapper == "zero1" ? 1 : 2});
      parameters.clear();
      for (const auto& shard : zero->shards()) parameters.push_back(shard.tensor);
    }
    optimizer = kinds.at(kind)(parameters);
  }

  GradientSynchronizer& wrapper() {
    if (ddp) return *ddp;
    if (zero) return *zero;
    return *fsdp;
  }

  /// The loss of the whole batch of step `step`, before its update.
  double run_step(int64_t step, const comm::Group& group) {
    const Batch mine = part_of(whole_batch(kTrainSamples, step), ranks, rank);
    wrapper().begin_step();
    const at::Tensor loss = loss_of(net->forward(mine.x), mine.y, kTrainSamples);
    loss.backward();
    wrapper().finish();
    optimizer->step();
    wrapper().after_update();
    const at::Tensor sum = loss.detach().clone();
    comm::all_reduce(group, sum);
    return sum.item<double>();
  }

  /// What the rank holds of the optimizer's state, with the values that a whole copy has there.
  void expect_state(const std::map<std::string, at::Tensor>& whole) {
    const auto held = checkpoint::optimizer_tensors(*net, *optimizer);
    EXPECT_EQ(held.size(), whole.size());
    for (const auto& [tensor, slice] : held) EXPECT_TRUE(at::equal(tensor, take(whole.at(slice.name), slice))) << slice.name;
  }

  int ranks, rank;
  std::shared_ptr<Net> net = std::make_shared<Net>();
  std::unique_ptr<DistributedDataParallel> ddp;
  std::unique_ptr<ShardedDataParallel> zero;
  std::unique_ptr<FullyShardedDataParallel> fsdp;
  TorchOptimizer optimizer;
};

class TorchOptimizers : public ::testing::TestWithParam<std::tuple<std::string, std::string>> {};

std::vector<std::string> kind_names() {
  std::vector<std::string> names;
  for (const auto& [name, make] : kinds) names.push_back(name);
  return names;
}
INSTANTIATE_TEST_SUITE_P(Checkpoint, TorchOptimizers, ::testing::Combine(::testing::Values("ddp", "zero1", "zero2", "fsdp"), ::testing::ValuesIn(kind_names())),
                         [](const auto& info) { return std::get<0>(info.param) + "_" + std::get<1>(info.param); });

TEST_P(TorchOptimizers, AreSavedByNameAndLoadInOtherLayouts) {
  const auto& [wrapper, kind] = GetParam();
  const checkpoint::TemporaryFolder folder;
  std::vector<double> expected;
  std::filesystem::path saved;
  run_ranks(2, [&, &wrapper = wrapper, &kind = kind](World& world) {
    TorchRun run(wrapper, world, kind);
    for (int step = 0; step < 2; ++step) run.run_step(step, world.group());
    const auto path = checkpoint::save(folder.path(), 2, *run.net, *run.optimizer, world.group(), {{"tokens", 24}});
    std::vector<double> losses;
    for (int step = 2; step < 4; ++step) losses.push_back(run.run_step(step, world.group()));
    if (world.rank() == 0) {
      saved = path;
      expected = losses;
    }
  });

  // Put together again by the plan of one rank.
  std::map<std::string, at::Tensor> whole;
  run_ranks(1, [&, &kind = kind](World& world) {
    TorchRun run("ddp", world, kind);
    checkpoint::load(saved, *run.net, *run.optimizer);
    for (const auto& [tensor, slice] : checkpoint::optimizer_tensors(*run.net, *run.optimizer)) whole[slice.name] = tensor.clone();
  });
  const size_t states = kind == "sgd_plain" ? 0 : kind == "adam" || kind == "rmsprop" ? 3 : kind == "adamw" ? 2 : 1;
  EXPECT_EQ(whole.size(), states * Net().parameters().size());

  for (const int ranks : {1, 2, 3}) {
    run_ranks(ranks, [&, &wrapper = wrapper, &kind = kind](World& world) {
      TorchRun run(wrapper, world, kind);
      run.optimizer->param_groups()[0].options().set_lr(5);  // the saved one comes back
      const auto resumed = checkpoint::load(saved, *run.net, *run.optimizer);
      EXPECT_EQ(resumed.step, 2);
      EXPECT_EQ(resumed.progress.at("tokens"), 24);
      run.expect_state(whole);
      for (int step = 2; step < 4; ++step) {
        const double loss = run.run_step(step, world.group()), was = expected[static_cast<size_t>(step) - 2];
        if (ranks == 2) {
          EXPECT_EQ(loss, was);
        } else {
          EXPECT_NEAR(loss, was, 5e-6 * was);
        }
      }
    });
  }
}

TEST(TorchOptimizerCheckpoints, KnowWhichParametersWereNeverUpdated) {
  const checkpoint::TemporaryFolder folder;
  run_ranks(1, [&](World& world) {
    TorchRun run("ddp", world, "adamw");
    run.net->scale.requires_grad_(false);
    run.ddp = std::make_unique<DistributedDataParallel>(*run.net, world.group());
    run.run_step(0, world.group());
    const auto saved = checkpoint::save(folder.path(), 1, *run.net, *run.optimizer, world.group());
    TorchRun other("ddp", world, "adamw");
    other.run_step(0, world.group());
    checkpoint::load(saved, *other.net, *other.optimizer);
    EXPECT_EQ(other.optimizer->state().count(other.net->scale.unsafeGetTensorImpl()), 0u);
    EXPECT_EQ(checkpoint::optimizer_tensors(*other.net, *other.optimizer).size(), 2 * (other.net->parameters().size() - 1));
  });
}

TEST(TorchOptimizerCheckpoints, AdamWAndOursReadEachOther) {
  const checkpoint::TemporaryFolder folder;
  run_ranks(1, [&](World& world) {
    TorchRun run("ddp", world, "adamw");
    run.run_step(0, world.group());
    const auto saved = checkpoint::save(folder.path(), 1, *run.net, *run.optimizer, world.group());
    Net net;
    nn::assign_paths(net);
    optim::AdamW ours({{nn::unique_parameters(net), 0.01}}, {0.9, 0.999, 1e-8});
    checkpoint::load(saved, net, ours);
    EXPECT_EQ(ours.update_counts().at("first.weight"), 1);
    EXPECT_TRUE(at::equal(ours.state().front().tensor, checkpoint::optimizer_tensors(*run.net, *run.optimizer).front().tensor));
  });
}

/// In bf16 what was written since the last update in fp16 may round to what its master rounds to, and the next update would not see it.
TEST(TorchOptimizerCheckpoints, MastersOfWeightsOfAnotherTypeFollowWhatWasWritten) {
  const checkpoint::TemporaryFolder folder;
  const at::Tensor master = at::full({2, 3}, 0.3F), written = master.to(at::kHalf);
  written[1].fill_(0.2998F);
  at::Tensor expected = master.clone();
  expected[1].copy_(written[1]);
  ASSERT_TRUE(at::equal(expected.to(at::kBFloat16), master.to(at::kBFloat16)));
  ASSERT_FALSE(at::equal(expected, master));
  checkpoint::CheckpointState state;
  state.tensors = {{written, Slice::whole("model.weight", {2, 3})}, {master, Slice::whole("optimizer.master.weight", {2, 3})}};
  state.optimizer = {{"kind", "sgd"}, {"update_counts", {{"weight", 3}}}};
  const auto saved = checkpoint::save(folder.path(), state, comm::Group::self());

  torch::nn::Linear model(torch::nn::LinearOptions(3, 2).bias(false));
  model->to(at::kBFloat16);
  OptimConfig config;
  config.name = "sgd";
  const auto optimizer = precision::make_optimizer(config, {.params = at::kBFloat16, .compute = at::kBFloat16}, 0, nn::unique_parameters(*model));
  checkpoint::load(saved, *model, *optimizer, {.convert = true});
  EXPECT_TRUE(at::equal(model->weight, expected.to(at::kBFloat16)));
  ASSERT_EQ(optimizer->state().size(), 1U);
  EXPECT_TRUE(at::equal(optimizer->state().front().tensor, expected)) << optimizer->state().front().tensor;
}

void expect_equal(const std::vector<at::Tensor>& got, const std::vector<at::Tensor>& want) {
  ASSERT_EQ(got.size(), want.size());
  for (size_t i = 0; i < got.size(); ++i) EXPECT_TRUE(at::equal(got[i], want[i])) << i;
}

struct Two : torch::nn::Module {
  Two() {
    register_module("a", a);
    register_module("b", b);
  }
  std::shared_ptr<Net> a = std::make_shared<Net>(), b = std::make_shared<Net>();
};

/// Wraps each part of a model by itself.
struct WrappedParts {
  WrappedParts(Two& two, const std::string& wrapper, World& world) {
    for (Net* part : {two.a.get(), two.b.get()}) {
      if (wrapper == "ddp") synchronizers.push_back(std::make_unique<DistributedDataParallel>(*part, world.group()));
      if (wrapper == "zero") synchronizers.push_back(std::make_unique<ShardedDataParallel>(*part, ShardGroups{.shard = world.group()}));
      if (wrapper == "fsdp") synchronizers.push_back(fully_shard(*part, world.group()));
      for (const auto& updated : synchronizers.back()->updated()) parameters.push_back(updated.tensor);
    }
    optimizer = kinds.at("adamw")(parameters);
  }
  void train(Two& two, World& world) {
    for (int step = 0; step < 2; ++step) {
      for (auto& synchronizer : synchronizers) synchronizer->clear_gradients();
      const Batch mine = part_of(whole_batch(kTrainSamples, step), world.size(), world.rank());
      (loss_of(two.a->forward(mine.x), mine.y, kTrainSamples) + 3 * loss_of(two.b->forward(mine.x * 2), mine.y, kTrainSamples)).backward();
      optimizer->step();
      for (auto& synchronizer : synchronizers) synchronizer->after_update();
    }
  }
  std::vector<std::unique_ptr<GradientSynchronizer>> synchronizers;
  std::vector<at::Tensor> parameters;
  TorchOptimizer optimizer;
};

std::vector<at::Tensor> copies(const std::vector<checkpoint::SlicedTensor>& tensors) {
  std::vector<at::Tensor> all;
  for (const auto& held : tensors) all.push_back(held.tensor.detach().clone());
  return all;
}

TEST(TorchOptimizerCheckpoints, KeepPartsThatAreWrappedOneByOneApart) {
  for (const std::string wrapper : {"ddp", "zero", "fsdp"}) {
    SCOPED_TRACE(wrapper);
    const checkpoint::TemporaryFolder folder;
    run_ranks(2, [&](World& world) {
      Two two;
      WrappedParts run(two, wrapper, world);
      run.train(two, world);
      const auto saved = checkpoint::save(folder.path(), 2, two, *run.optimizer, world.group());
      const auto weights = copies(checkpoint::training_tensors(two, nullptr)), states = copies(checkpoint::optimizer_tensors(two, *run.optimizer));
      EXPECT_EQ(checkpoint::read_manifest(saved).tensors.size(), 3 * two.parameters().size());
      Two other;
      WrappedParts resumed(other, wrapper, world);
      checkpoint::load(saved, other, *resumed.optimizer);
      expect_equal(copies(checkpoint::training_tensors(other, nullptr)), weights);
      expect_equal(copies(checkpoint::optimizer_tensors(other, *resumed.optimizer)), states);
      Two plain;  // names are those of one process
      const auto optimizer = kinds.at("adamw")(plain.parameters());
      checkpoint::load(saved, plain, *optimizer);
      EXPECT_FALSE(at::equal(plain.a->first->weight, plain.b->first->weight));
    });
  }
}

TEST(TorchOptimizerCheckpoints, PartsOnMetaStartAsInOneProcess) {
  const auto build = [] { return std::make_shared<Two>(); };
  const auto alone = on_meta(build);
  materialize(*alone, 5, testing_support::test_device());
  run_ranks(2, [&](World& world) {
    const auto two = on_meta(build);
    const auto a = fully_shard(*two->a, world.group()), b = fully_shard(*two->b, world.group());
    materialize(*two, 5, testing_support::test_device());
    unshard(*two->a);
    unshard(*two->b);
    expect_equal(two->parameters(), alone->parameters());
  });
}

TEST(TorchOptimizerCheckpoints, OurOptimizerRefusesTwoParametersOfOneName) {
  run_ranks(2, [](World& world) {
    Two two;
    const ShardedDataParallel a(*two.a, {.shard = world.group()}), b(*two.b, {.shard = world.group()});
    std::vector<nn::NamedParameter> updated = a.updated();
    for (const auto& parameter : b.updated()) updated.push_back(parameter);
    try {
      optim::AdamW both({{updated, 0.01}}, {0.9, 0.999, 1e-8});
      ADD_FAILURE() << "accepted";
    } catch (const ConfigError& error) {
      EXPECT_THAT(error.what(), HasSubstr("two parameters of one name"));
    }
  });
}

TEST(TorchOptimizerCheckpoints, RefuseTheOptimizerOfAnotherModel) {
  for (const std::string wrapper : {"zero", "fsdp"}) {
    const checkpoint::TemporaryFolder folder;
    run_ranks(2, [&](World& world) {
      Two two;
      WrappedParts run(two, wrapper, world);
      run.train(two, world);
      try {
        checkpoint::save(folder.path(), 1, *two.a, *run.optimizer, world.group());
        ADD_FAILURE() << wrapper << ": saved b's state under a's names";
      } catch (const ConfigError& error) {
        EXPECT_THAT(error.what(), HasSubstr("that is no parameter of this model"));
      }
    });
  }
}

TEST(TorchOptimizerCheckpoints, OfAModelAlone) {
  const checkpoint::TemporaryFolder dir;
  Net trained;
  const at::Tensor scale = trained.scale.detach().clone();
  std::filesystem::path folder;
  run_ranks(3, [&](World& world) {
    Net average;  // frozen, and wrapped for its memory alone
    for (auto& parameter : average.parameters()) parameter.requires_grad_(false);
    const auto sharded = fully_shard(average, world.group());
    const auto saved = checkpoint::save(dir.path(), 7, average, world.group(), {{"decay", 0.9}});
    if (world.rank() == 0) folder = saved;
  });
  run_ranks(2, [&](World& world) {
    Net average;
    const auto sharded = fully_shard(average, world.group());
    {
      const at::NoGradGuard no_grad;
      for (auto& parameter : average.parameters()) parameter.zero_();
    }
    const auto resumed = checkpoint::load(folder, average);
    EXPECT_EQ(resumed.step, 7);
    EXPECT_EQ(resumed.progress.at("decay"), 0.9);
    torch::optim::SGD optimizer(average.parameters(), 0.1);
    EXPECT_THAT(refusal([&] { checkpoint::load(folder, average, optimizer); }), HasSubstr("saved without an optimizer; load the model alone"));
    EXPECT_THAT(refusal([&] { checkpoint::load("", average); }), HasSubstr("no folder was given to load from"));
    unshard(average);
    EXPECT_TRUE(at::equal(average.scale, scale));
  });
}

TEST(TorchOptimizerCheckpoints, RefuseWhatDoesNotFit) {
  const checkpoint::TemporaryFolder folder;
  const auto refusal = [](auto&& action) -> std::string {
    try {
      action();
    } catch (const ConfigError& error) {
      return error.what();
    }
    return "accepted";
  };
  run_ranks(1, [&](World& world) {
    TorchRun run("ddp", world, "adamw"), sgd("ddp", world, "sgd");
    run.run_step(0, world.group());
    const auto saved = checkpoint::save(folder.path(), 1, *run.net, *run.optimizer, world.group());
    EXPECT_THAT(refusal([&] { checkpoint::load(saved, *sgd.net, *sgd.optimizer); }), HasSubstr("the checkpoint's optimizer is adamw and this one is sgd"));
    EXPECT_EQ(checkpoint::load(saved, *sgd.net).step, 1);
    torch::optim::LBFGS other(run.net->parameters());
    EXPECT_THAT(refusal([&] { checkpoint::save(folder.path(), 2, *run.net, other, world.group()); }), HasSubstr("none of Adam, AdamW"));
    torch::optim::AdamW foreign(std::vector<at::Tensor>{at::ones({3}).requires_grad_()});
    EXPECT_THAT(refusal([&] { checkpoint::save(folder.path(), 2, *run.net, foreign, world.group()); }), HasSubstr("no parameter of this model"));
  });
}

TEST(TorchOptimizerCheckpoints, AForwardUnderWayIsNotSaved) {
  const checkpoint::TemporaryFolder folder;
  run_ranks(2, [&](World& world) {
    const auto net = std::make_shared<torch::nn::LinearImpl>(4, 3);
    const auto sharded = fully_shard(*net, world.group(), {.replicas = ReplicaStart::Broadcast, .trigger = ShardTrigger::Operators});
    torch::optim::AdamW optimizer(net->parameters());
    const at::Tensor loss = net->forward(at::ones({2, 4})).sum();
    try {
      checkpoint::save(folder.path(), 1, *net, optimizer, world.group());
      ADD_FAILURE() << "saved whole parameters as slices";
    } catch (const std::exception& error) {  // gathered from all ranks
      EXPECT_THAT(error.what(), HasSubstr("weight' shows shape [3, 4]"));
      EXPECT_THAT(error.what(), HasSubstr("NoGradGuard"));
    }
    loss.backward();
    checkpoint::save(folder.path(), 1, *net, optimizer, world.group());
  });
}

/// A loop that meets a batch that it does not like, and goes back to its last checkpoint, has made a forward that no backward follows.
TEST(TorchOptimizerCheckpoints, LoadBehindAForwardThatNoBackwardFollows) {
  for (const std::string what : {"model", "torch", "ours"}) {
    const auto run = [&](Net& net, const std::filesystem::path& folder, const comm::Group& group, const auto& part) {
      const auto torchs = kinds.at("adamw")(net.parameters());
      optim::AdamW ours({{nn::unique_parameters(net), 0.01}});
      const auto loss = [&](int64_t step) {
        const Batch mine = part(whole_batch(kTrainSamples, step));
        return loss_of(net.forward(mine.x), mine.y, kTrainSamples);
      };
      const auto update = [&](int64_t step) {
        net.zero_grad();
        const at::Tensor value = loss(step);
        value.backward();
        what == "ours" ? ours.step(0.01) : static_cast<void>(torchs->step());
        const at::Tensor sum = value.detach().clone();
        comm::all_reduce(group, sum);
        return sum.item<double>();
      };
      for (int64_t step = 0; step < 2; ++step) update(step);
      const auto saved = what == "ours" ? checkpoint::save(folder, 2, net, ours, group) : checkpoint::save(folder, 2, net, *torchs, group);
      update(2);
      net.zero_grad();
      const at::Tensor given_up = loss(3);
      if (what == "ours") {
        checkpoint::load(saved, net, ours);
      } else if (what == "torch") {
        checkpoint::load(saved, net, *torchs);
      } else {
        checkpoint::load(saved, net);
      }
      std::vector<double> losses;
      for (int64_t step = 2; step < 5; ++step) losses.push_back(update(step));
      EXPECT_THROW(given_up.backward(), c10::Error) << "its weights were written";
      return losses;
    };
    Net reference;
    const checkpoint::TemporaryFolder alone;
    const std::vector<double> expected = run(reference, alone.path(), comm::Group::self(), [](const Batch& batch) { return batch; });
    for (const int ranks : {2, 3}) {
      const checkpoint::TemporaryFolder folder;
      run_ranks(ranks, [&](World& world) {
        Net net;
        const auto sharded = fully_shard(net, world.group());
        const auto losses = run(net, folder.path(), world.group(), [&](const Batch& batch) { return part_of(batch, ranks, world.rank()); });
        for (size_t i = 0; i < losses.size(); ++i) EXPECT_NEAR(losses[i], expected[i], 1e-5 * expected[i]) << what << " on " << ranks << " ranks, loss " << i;
        for (const at::Tensor& parameter : net.parameters()) at::Tensor(parameter).requires_grad_(false);
      });
    }
  }
}

struct WithHead : torch::nn::Module {
  explicit WithHead(int64_t classes) : head(4, classes) {
    register_module("body", body);
    register_module("head", head);
    fill_parameters(*this);
  }
  void update(torch::optim::Optimizer& optimizer, int64_t step) {
    optimizer.zero_grad();
    head(at::tanh(body(whole_batch(kTrainSamples, step).x))).square().sum().backward();
    optimizer.step();
  }
  torch::nn::Linear body{5, 4}, head;
};

/// State that an option alone makes is not there where the option was off: libtorch would meet an undefined tensor at the next update.
TEST(TorchOptimizerCheckpoints, RefuseOptionsThatWantStateThatWasNotSaved) {
  const checkpoint::TemporaryFolder folder;
  const auto rmsprop = [](const std::vector<at::Tensor>& p, double momentum, bool centered) {
    return std::make_unique<torch::optim::RMSprop>(p, torch::optim::RMSpropOptions(0.01).momentum(momentum).centered(centered));
  };
  const auto adam = [](const std::vector<at::Tensor>& p, bool amsgrad) {
    return std::make_unique<torch::optim::Adam>(p, torch::optim::AdamOptions(0.01).amsgrad(amsgrad));
  };
  run_ranks(1, [&](World& world) {
    WithHead net(3);
    const auto p = net.parameters();
    const auto expect_refused = [&](const TorchOptimizer& before, const TorchOptimizer& after, const std::string& option, const std::string& state) {
      net.update(*before, 0);
      const auto saved = checkpoint::save(folder / option, 1, net, *before, world.group());
      EXPECT_THAT([&] { checkpoint::load(saved, net, *after); },
                  ::testing::ThrowsMessage<ConfigError>(HasSubstr("was saved without " + option + ", and has no " + state + " for '")));
      EXPECT_NO_THROW(checkpoint::load(saved, net, *before));
    };
    expect_refused(adam(p, false), adam(p, true), "amsgrad", "max_exp_avg_sq");
    expect_refused(rmsprop(p, 0, false), rmsprop(p, 0.9, false), "momentum", "momentum_buffer");
    expect_refused(rmsprop(p, 0, false), rmsprop(p, 0, true), "centered", "grad_avg");
    const auto with = adam(p, true), without = adam(p, false);
    net.update(*with, 0);
    EXPECT_NO_THROW(checkpoint::load(checkpoint::save(folder / "more", 1, net, *with, world.group()), net, *without)) << "more than is needed";
  });
}

/// A second model under the same number would be all that is left.
TEST(TorchOptimizerCheckpoints, RefuseAnotherModelInThePlaceOfOne) {
  const checkpoint::TemporaryFolder folder;
  run_ranks(2, [&](World& world) {
    WithHead net(3), average(3), wider(4);
    torch::nn::Linear critic(5, 1);
    torch::optim::AdamW optimizer(net.parameters(), 0.1);
    const auto save = [&] { return checkpoint::save(folder.path(), 1, net, optimizer, world.group(), {{"epoch", 7}}); };
    const auto saved = save();
    EXPECT_THAT([&] { checkpoint::save(folder.path(), 1, average, world.group()); },
                ::testing::ThrowsMessage<Error>(AllOf(HasSubstr("with its optimizer's state, where this save has none"), HasSubstr("a folder of its own"))));
    EXPECT_THAT([&] { checkpoint::save(folder.path(), 1, *critic, world.group()); }, ::testing::ThrowsMessage<Error>(HasSubstr("which has no 'model.weight'")));
    EXPECT_THAT([&] { checkpoint::save(folder.path(), 1, wider, world.group()); },
                ::testing::ThrowsMessage<Error>(HasSubstr("whose 'model.head.weight' is [3, 4]")));
    EXPECT_EQ(checkpoint::load(saved, net, optimizer).progress.at("epoch"), 7) << "what was there is there";
    net.update(optimizer, 0);
    EXPECT_NO_THROW(save()) << "the model itself, with state that it had not before";
    EXPECT_NO_THROW(checkpoint::save(folder.path(), 2, average, world.group())) << "at another step";
    EXPECT_THAT([&] { checkpoint::save(folder.path(), 2, net, optimizer, world.group()); },
                ::testing::ThrowsMessage<Error>(HasSubstr("without an optimizer's state, where this save has one")));
  });
}

/// One of two models may be a part of the other, in either order: what an actor has besides its critic's layers, a teacher's further layers, running
/// statistics.
TEST(TorchOptimizerCheckpoints, RefuseAPartOfAModelInThePlaceOfTheWhole) {
  struct Actor : torch::nn::Module {
    explicit Actor(bool whole) {
      register_module("fc", torch::nn::Linear(5, 4));
      if (whole) register_parameter("log_std", at::zeros({4}));
    }
  };
  struct Normed : torch::nn::Module {
    explicit Normed(bool normed) {
      register_module("fc", torch::nn::Linear(5, 4));
      if (normed) register_buffer("mean", at::zeros({4}));
    }
  };
  const checkpoint::TemporaryFolder folder;
  run_ranks(2, [&](World& world) {
    const auto save = [&](const std::string& name, torch::nn::Module& model) {
      torch::optim::SGD optimizer(model.parameters(), torch::optim::SGDOptions(0.1));
      return checkpoint::save(folder / name, 1, model, optimizer, world.group());
    };
    Actor actor(true), critic(false);
    const auto refused = [](const std::string& what) { return ::testing::ThrowsMessage<Error>(AllOf(HasSubstr(what), HasSubstr("a folder of its own"))); };
    save("a", actor);
    EXPECT_THAT([&] { save("a", critic); }, refused("which has 'model.log_std', where this save has none"));
    EXPECT_NO_THROW(save("a", actor));
    save("b", critic);
    EXPECT_THAT([&] { save("b", actor); }, refused("which has no 'model.log_std'"));
    Normed with(true), without(false);
    save("c", with);
    EXPECT_THAT([&] { save("c", without); }, refused("which has 'buffer.mean', where this save has none"));
    save("d", without);
    EXPECT_THAT([&] { save("d", with); }, refused("which has no 'buffer.mean'"));
    torch::optim::Adam other(actor.parameters());
    EXPECT_THAT([&] { checkpoint::save(folder / "a", 1, actor, other, world.group()); }, refused("updated by sgd, where this save's is by adam"));
    for (const auto& kept : std::filesystem::directory_iterator(folder / "a")) EXPECT_EQ(kept.path().filename(), "step-00000001");
  });
}

/// A place in the data that each rank has for itself would be lost but for rank 0's.
TEST(TorchOptimizerCheckpoints, RefuseProgressThatDiffersByRank) {
  const checkpoint::TemporaryFolder folder;
  run_ranks(2, [&](World& world) {
    TorchRun run("ddp", world, "adamw");
    EXPECT_THAT([&] { checkpoint::save(folder.path(), 1, *run.net, *run.optimizer, world.group(), {{"cursor", world.rank()}}); },
                ::testing::ThrowsMessage<ConfigError>(HasSubstr("tell each other before")));
    EXPECT_NO_THROW(checkpoint::save(folder.path(), 1, *run.net, *run.optimizer, world.group(), {{"cursor", 7}}));
  });
}

/// JSON would have null for it, which no rank has given, and which is no number when it is read.
TEST(TorchOptimizerCheckpoints, RefuseProgressThatIsNoFiniteNumber) {
  const checkpoint::TemporaryFolder folder;
  constexpr double inf = std::numeric_limits<double>::infinity(), nan = std::numeric_limits<double>::quiet_NaN();
  for (const int ranks : {1, 2}) {
    run_ranks(ranks, [&](World& world) {
      TorchRun run("ddp", world, "adamw");
      const auto save = [&](const nlohmann::json& progress) { checkpoint::save(folder.path(), 1, *run.net, *run.optimizer, world.group(), progress); };
      const auto refused = [&](const nlohmann::json& progress, const std::string& what) {
        EXPECT_THAT([&] { save(progress); }, ::testing::ThrowsMessage<ConfigError>(
                                                 ::testing::AllOf(HasSubstr("checkpoint: progress." + what + " cannot be saved"), HasSubstr("as text"))));
      };
      refused({{"best", inf}}, "best = inf");
      refused({{"epoch", 3}, {"losses", {0.5, nan}}}, "losses.1 = nan");
      refused({{"best", world.rank() + 1 == ranks ? -inf : 2.0}}, "best = -inf");  // of one rank: all refuse it
      EXPECT_NO_THROW(save({{"best", "inf"}, {"losses", {0.5, nullptr}}}));
    });
  }
}

TEST(TorchOptimizerCheckpoints, WhatPartialLeavesHasNoPastUpdates) {
  const checkpoint::TemporaryFolder folder;
  for (const std::string kind : {"adam", "adagrad", "rmsprop"}) {
    run_ranks(1, [&](World& world) {
      WithHead saved(3), loaded(6);
      const auto before = kinds.at(kind)(saved.parameters()), after = kinds.at(kind)(loaded.parameters());
      for (int64_t step = 0; step < 4; ++step) saved.update(*before, step);
      const auto checkpoint = checkpoint::save(folder / kind, 4, saved, *before, world.group());
      checkpoint::load(checkpoint, loaded, *after, {.partial = {"head.*"}});
      // As one whose head has never been updated, and whose body has.
      WithHead whole(6);
      const auto expected = kinds.at(kind)(whole.parameters());
      {
        const at::NoGradGuard no_grad;
        for (size_t i = 0; i < 2; ++i) whole.body->parameters()[i].copy_(saved.body->parameters()[i]);
      }
      loaded.update(*after, 4);
      whole.update(*expected, 4);
      EXPECT_TRUE(at::equal(loaded.head->weight, whole.head->weight)) << kind;
      EXPECT_FALSE(at::equal(loaded.body->weight, whole.body->weight)) << kind;
    });
  }
}

TEST(TorchOptimizerCheckpoints, AdagradGoesOnWithParametersThatItDidNotHave) {
  const checkpoint::TemporaryFolder folder;
  run_ranks(1, [&](World& world) {
    WithHead saved(3), loaded(3);
    const auto before = kinds.at("adagrad")(saved.head->parameters()), after = kinds.at("adagrad")(loaded.parameters());
    saved.update(*before, 0);
    checkpoint::load(checkpoint::save(folder.path(), 1, saved, *before, world.group()), loaded, *after);
    loaded.update(*after, 1);
    EXPECT_FALSE(at::equal(loaded.body->weight, saved.body->weight));
  });
}

TEST(TorchOptimizerCheckpoints, OneGroupInPlaceOfSeveralIsRefused) {
  const checkpoint::TemporaryFolder folder;
  run_ranks(1, [&](World& world) {
    const auto in_groups = [](WithHead& model, bool apart) {
      std::vector<torch::optim::OptimizerParamGroup> groups;
      auto first = model.body->parameters();
      const auto second = model.head->parameters();
      if (!apart) first.insert(first.end(), second.begin(), second.end());
      groups.emplace_back(first);
      if (apart) groups.emplace_back(second);
      return std::make_unique<torch::optim::SGD>(groups, torch::optim::SGDOptions(0.5));
    };
    WithHead saved(3), loaded(3);
    const auto before = in_groups(saved, true), same = in_groups(loaded, true), other = in_groups(loaded, false);
    before->param_groups()[0].options().set_lr(0.1);
    before->param_groups()[1].options().set_lr(0.001);
    const auto checkpoint = checkpoint::save(folder.path(), 1, saved, *before, world.group());
    checkpoint::load(checkpoint, loaded, *same);
    EXPECT_EQ(same->param_groups()[0].options().get_lr(), 0.1);
    EXPECT_EQ(same->param_groups()[1].options().get_lr(), 0.001);
    try {
      checkpoint::load(checkpoint, loaded, *other);
      ADD_FAILURE() << "one group took two rates";
    } catch (const ConfigError& error) {
      EXPECT_THAT(error.what(), ::testing::AllOf(HasSubstr("0.1 ('body.weight')"), HasSubstr("0.001 ('head.weight')")));
    }
    EXPECT_EQ(other->param_groups()[0].options().get_lr(), 0.5);
  });
}

}  // namespace
}  // namespace tessera
