#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <torch/nn/utils/clip_grad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/lbfgs.h>
#include <torch/optim/sgd.h>

#include "tessera/comm/collectives.h"
#include "tessera/data_parallel/distributed_data_parallel.h"
#include "tessera/mesh/mesh.h"
#include "tessera/nn/attach.h"
#include "tessera/optim/adafactor.h"
#include "tessera/optim/adamw.h"
#include "tessera/optim/clip_grad_norm.h"
#include "tessera/zero/sharded_data_parallel.h"
#include "tessera/zero/zero_optimizer.h"
#include "tests/nn/net.h"
#include "tests/nn/plain_loop.h"
#include "tests/train/wrapped.h"

/// clip_grad_norm and zero_optimizer under the wrappers: what takes several rooms.
namespace tessera {
namespace {

using comm::run_ranks;
using comm::World;
using ::testing::HasSubstr;
using namespace testing_support;

constexpr double max_norm = 0.1;
constexpr int steps = 3;

const auto make_torch = [](const std::vector<at::Tensor>& tensors) {
  return std::make_unique<torch::optim::AdamW>(tensors, torch::optim::AdamWOptions(0.02).weight_decay(0.1));
};

using Wrap = std::function<std::unique_ptr<GradientSynchronizer>(torch::nn::Module&, World&)>;

const std::vector<std::pair<std::string, Wrap>>& wrappers() {
  static const std::vector<std::pair<std::string, Wrap>> all{
      {"ddp", [](torch::nn::Module& module,
                 World& world) { return std::make_unique<DistributedDataParallel>(module, world.group(), DdpOptions{.sizes = small_buckets}); }},
      {"zero 1",
       [](torch::nn::Module& module, World& world) {
         return std::make_unique<ShardedDataParallel>(module, ShardGroups{.shard = world.group()}, ZeroOptions{.stage = 1, .sizes = small_buckets});
       }},
      {"zero 2",
       [](torch::nn::Module& module, World& world) {
         return std::make_unique<ShardedDataParallel>(module, ShardGroups{.shard = world.group()}, ZeroOptions{.stage = 2, .sizes = small_buckets});
       }},
      {"hybrid", [](torch::nn::Module& module, World& world) {
         const Mesh mesh(world, {{"dp_replicate", 2}, {"dp_shard", world.size() / 2}});
         return std::make_unique<ShardedDataParallel>(module, ShardGroups{.shard = mesh["dp_shard"], .replicate = mesh["dp_replicate"]},
                                                      ZeroOptions{.stage = 2, .sizes = small_buckets});
       }}};
  return all;
}

TEST(ClipWrapped, IsOneProcesssNormUnderEveryWrapper) {
  Net reference;
  std::vector<double> norms;
  const auto optimizer = make_torch(reference.parameters());
  for (int step = 0; step < steps; ++step) {
    optimizer->zero_grad();
    backward(reference, whole_batch(samples, step));
    norms.push_back(torch::nn::utils::clip_grad_norm_(reference.parameters(), max_norm));
    optimizer->step();
  }
  for (const auto& [name, wrap] : wrappers()) {
    for (const int ranks : {2, 4}) {
      run_ranks(ranks, [&, &name = name, &wrap = wrap](World& world) {
        Net net;
        const auto wrapped = wrap(net, world);
        auto optimizer = zero_optimizer(net, make_torch);
        for (int step = 0; step < steps; ++step) {
          optimizer.zero_grad();
          backward(net, part_of(whole_batch(samples, step), ranks, world.rank()));
          const at::Tensor norm = step % 2 ? clip_grad_norm(net, max_norm) : clip_grad_norm(*wrapped, max_norm);
          EXPECT_NEAR(norm.item<double>(), norms[step], 1e-4 * norms[step]) << name;
          optimizer.step();
        }
        EXPECT_LT(largest_difference(weights_of(net), weights_of(reference)), 10 * parity) << name;
      });
    }
  }
}

/// Sums of rows and columns read what a wrapper's operators would take for a use of the parameter.
TEST(ClipWrapped, AdafactorStepsInThePlainLoopOfEveryWrapper) {
  Net reference;
  nn::assign_paths(reference);
  optim::WholeModel all;
  for (const auto& parameter : nn::unique_parameters(reference)) all.parameters.push_back(Slice::whole(parameter.name, parameter.tensor.sizes().vec()));
  const auto make = [](const std::vector<nn::NamedParameter>& parameters, optim::WholeModel whole) {
    return std::make_unique<optim::Adafactor>(optim::decay_groups(parameters, "all", 0.01), optim::AdafactorOptions{}, std::move(whole));
  };
  const auto optimizer = make(nn::unique_parameters(reference), {});
  for (int step = 0; step < steps; ++step) {
    reference.zero_grad();
    backward(reference, whole_batch(samples, step));
    optimizer->step(0.02);
  }
  for (const auto& [name, wrap] : wrappers()) {
    run_ranks(2, [&, &name = name, &wrap = wrap](World& world) {
      Net net;
      const auto wrapped = wrap(net, world);
      optim::WholeModel whole = all;
      whole.ranks = wrapped->norm_group();
      auto parts = zero_optimizer(net, [&](const std::vector<nn::NamedParameter>& updated) { return make(updated, whole); });
      for (int step = 0; step < steps; ++step) {
        net.zero_grad();
        backward(net, part_of(whole_batch(samples, step), 2, world.rank()));
        parts.step(0.02);
      }
      EXPECT_LT(largest_difference(weights_of(net), weights_of(reference)), 10 * parity) << name;
    });
  }
}

/// Integers have no gradient: neither a norm nor an optimizer's counts know of them, whichever wrapper lists them.
TEST(ClipWrapped, ParametersThatAreCodesAreLeftOut) {
  Net reference;
  backward(reference, whole_batch(samples));
  const double expected = torch::nn::utils::clip_grad_norm_(reference.parameters(), max_norm);
  for (const auto& [name, wrap] : wrappers()) {
    run_ranks(2, [&, &name = name, &wrap = wrap](World& world) {
      Net net;
      net.register_parameter("codes", at::arange(5, at::kChar), /*requires_grad=*/false);
      const auto wrapped = wrap(net, world);
      auto optimizer = zero_optimizer(
          net, [](const std::vector<nn::NamedParameter>& updated) { return std::make_unique<optim::AdamW>(std::vector{optim::ParameterGroup{updated}}); });
      backward(net, part_of(whole_batch(samples), 2, world.rank()));
      EXPECT_NEAR(clip_grad_norm(net, max_norm).item<double>(), expected, 1e-4 * expected) << name;
      optimizer.step(0.1);
      EXPECT_FALSE(optimizer.inner().update_counts().contains("codes")) << name;
      EXPECT_TRUE(optimizer.inner().update_counts().contains("first.weight")) << name;
    });
  }
}

/// A part that a program has cut by itself, of which nothing says where the rest lies: the wrapper's ranks hold half of it between them.
TEST(ClipWrapped, WhatIsCutBesidesIsRefusedByName) {
  run_ranks(2, [](World& world) {
    Net net;
    Slice half = Slice::whole("scale", {14});
    half.boxes.front().size = {7};
    nn::set_slice(net.scale, half);
    const ShardedDataParallel zero(net, {.shard = world.group()}, {.stage = 1});
    backward(net, part_of(whole_batch(samples), 2, world.rank()));
    EXPECT_THAT(refusal([&] { clip_grad_norm(zero, max_norm); }), HasSubstr("is cut, and nothing says over which ranks"));
  });
}

TEST(ClipWrapped, SeveralWrappersInOneModelAndPartsOfOne) {
  struct Two : torch::nn::Module {
    Two() {
      a = register_module("a", std::make_shared<Net>());
      b = register_module("b", std::make_shared<Net>());
      alone = register_parameter("alone", at::ones({3}));
    }
    at::Tensor loss(const Batch& batch) { return loss_of(b->forward(at::constant_pad_nd(a->forward(batch.x), {0, 2})), batch.y, samples); }
    std::shared_ptr<Net> a, b;
    at::Tensor alone;
  };
  Two reference;
  reference.loss(whole_batch(samples)).backward();
  reference.alone.mutable_grad() = at::ones({3});
  const double expected = torch::nn::utils::clip_grad_norm_(reference.parameters(), max_norm);
  run_ranks(2, [&](World& world) {
    Two two;
    DistributedDataParallel ddp(*two.a, world.group());
    ShardedDataParallel zero(*two.b, {.shard = world.group()}, {.stage = 2});
    two.loss(part_of(whole_batch(samples), 2, world.rank())).backward();
    two.alone.mutable_grad() = at::ones({3});
    EXPECT_NEAR(clip_grad_norm(two, max_norm).item<double>(), expected, 1e-4 * expected);
    EXPECT_LT(largest_difference(gradients_of(*two.a), gradients_of(*reference.a)), 10 * parity);
    EXPECT_TRUE(at::allclose(two.alone.grad(), reference.alone.grad()));
    EXPECT_THAT(refusal([&] { clip_grad_norm(*two.b->first, max_norm); }), HasSubstr("has 2 of the 7 parameters of a wrapped module"));
    EXPECT_THAT(refusal([&] { (void)zero_optimizer(two, make_torch); }), HasSubstr("'alone' is in no wrapper"));
  });
}

TEST(ClipWrapped, APartOfAModelMayHaveANewerWrapper) {
  Net reference;
  backward(reference, whole_batch(samples));
  const double expected = torch::nn::utils::clip_grad_norm_(reference.parameters(), max_norm);
  for (const int ranks : {2, 3}) {
    run_ranks(ranks, [&](World& world) {
      Net net;
      ShardedDataParallel older(net, {.shard = world.group()}, {.stage = 2});
      DistributedDataParallel newer(*net.middle, world.group());
      backward(net, part_of(whole_batch(samples), ranks, world.rank()));
      EXPECT_NEAR(clip_grad_norm(net, max_norm).item<double>(), expected, 1e-4 * expected);
    });
  }
}

TEST(ClipWrapped, NothingIsClippedWithinAnAccumulation) {
  run_ranks(2, [](World& world) {
    Net net;
    const auto refused = [&](GradientSynchronizer& wrapper) {
      const Batch mine = part_of(whole_batch(samples), 2, world.rank());
      {
        const Attachment local = wrapper.no_sync();
        backward(net, mine);
        EXPECT_THAT(refusal([&] { clip_grad_norm(net, max_norm); }), HasSubstr("clip_grad_norm: the gradient of 'scale' waits whole on this rank"));
        EXPECT_THAT(refusal([&] { clip_grad_norm(wrapper, max_norm); }), HasSubstr("waits whole on this rank"));
      }
      backward(net, mine);
      EXPECT_GT(clip_grad_norm(net, max_norm).item<double>(), 0);
      net.zero_grad();
    };
    {
      DistributedDataParallel ddp(net, world.group());
      refused(ddp);
    }
    ShardedDataParallel zero(net, {.shard = world.group()}, {.stage = 2});
    refused(zero);
  });
}

/// LBFGS computes with whole vectors, which a rank has under DDP alone: there its closure returns the loss of all ranks, and every rank takes the same steps.
TEST(ClipWrapped, LbfgsNeedsWholeParametersAndALossOfAllRanks) {
  const auto make = [](const std::vector<at::Tensor>& tensors) {
    return std::make_unique<torch::optim::LBFGS>(tensors, torch::optim::LBFGSOptions(0.5).max_iter(4).line_search_fn("strong_wolfe"));
  };
  const auto train = [](Net& net, auto& optimizer, const std::function<Batch(int64_t)>& mine, const std::function<void(const at::Tensor&)>& sum) {
    for (int step = 0; step < steps; ++step) {
      optimizer.step([&] {
        optimizer.zero_grad();
        const Batch batch = mine(step);
        const at::Tensor loss = loss_of(net.forward(batch.x), batch.y, samples);
        loss.backward();
        const at::Tensor whole = loss.detach().clone();
        sum(whole);
        return whole;
      });
    }
  };
  Net reference;
  const auto alone = make(reference.parameters());
  train(reference, *alone, [](int64_t step) { return whole_batch(samples, step); }, [](const at::Tensor&) {});
  for (const auto& [name, wrap] : wrappers()) {
    run_ranks(4, [&, &name = name, &wrap = wrap](World& world) {
      Net net;
      const auto wrapped = wrap(net, world);
      if (name != "ddp") {
        EXPECT_THAT(refusal([&] { (void)zero_optimizer(net, make); }), HasSubstr("zero_optimizer: torch::optim::LBFGS")) << name;
        return;
      }
      auto optimizer = zero_optimizer(net, make);
      train(
          net, optimizer, [&](int64_t step) { return part_of(whole_batch(samples, step), 4, world.rank()); },
          [&](const at::Tensor& loss) { comm::all_reduce(world.group(), loss); });
      EXPECT_LT(largest_difference(weights_of(net), weights_of(reference)), 100 * parity);
    });
  }
}

void set_trained(Net& net, bool trained) {
  for (const at::Tensor& parameter : net.first->parameters()) at::Tensor(parameter).requires_grad_(trained);
}

TEST(ClipWrapped, OurOptimizersKeepStateOfWhatIsFrozenOnceItIsTrained) {
  const auto make = [](const std::vector<nn::NamedParameter>& parameters) {
    return std::make_unique<optim::AdamW>(optim::decay_groups(parameters, "all", 0.1));
  };
  const auto train = [](Net& net, auto& optimizer, const std::function<Batch(int64_t)>& mine, const std::function<void()>& updated) {
    for (int step = 0; step < 6; ++step) {
      set_trained(net, step >= 2 && step < 4);
      updated();
      backward(net, mine(step));
      optimizer.step(0.02);
    }
  };
  Net reference;
  set_trained(reference, false);
  const auto alone = make(nn::unique_parameters(reference));
  train(reference, *alone, [](int64_t step) { return whole_batch(samples, step); }, [&] { reference.zero_grad(); });
  for (const auto& [name, wrap] : wrappers()) {
    run_ranks(4, [&, &name = name, &wrap = wrap](World& world) {
      Net net;
      set_trained(net, false);
      const auto wrapped = wrap(net, world);
      auto optimizer = zero_optimizer(*wrapped, make);
      EXPECT_EQ(optimizer->state().size(), 2 * 5);
      train(net, optimizer, [&](int64_t step) { return part_of(whole_batch(samples, step), 4, world.rank()); }, [&] { optimizer.zero_grad(); });
      EXPECT_EQ(optimizer->state().size(), 2 * 7);
      EXPECT_LT(largest_difference(weights_of(net), weights_of(reference)), 10 * parity) << name;
    });
  }
}

/// With gradients recorded a line for the log begins a forward, as far as operators tell: under fully_shard parameters are whole when the optimizer comes, and
/// its state is of the parts all the same.
TEST(ClipWrapped, ALineForTheLogStandsBetweenBackwardAndStep) {
  const at::Tensor x = random_tensor({4, 5}, "x");
  const auto check = [&](const std::string& what, const auto& make, const auto& step) {
    for (const bool clips : {false, true}) {
      const auto loop = [&](ScaledLayer& net, auto& optimizer) {
        std::vector<double> lines;
        for (int i = 0; i < steps; ++i) {
          const auto gradients = [&] {
            optimizer.zero_grad();
            const at::Tensor loss = net.forward(x).square().sum();
            loss.backward();
            lines.push_back(net.scale.exp().item<double>());
            if (clips) clip_grad_norm(net, max_norm);
            return loss;
          };
          step(optimizer, gradients);
          lines.push_back(net.scale.exp().item<double>());
        }
        return lines;
      };
      ScaledLayer whole;
      const auto one = wrap_by("ddp", whole, {});
      auto alone = zero_optimizer(*one, make);
      const std::vector<double> expected = loop(whole, alone);
      for (const std::string& technique : techniques) {
        for (const int ranks : {1, 2, 3}) {
          run_ranks(ranks,
                    [&](World& world) {
                      ScaledLayer net;
                      const auto wrapped = wrap_by(technique, net, {.shard = world.group()}, {.average = true});
                      auto optimizer = zero_optimizer(net, make);
                      const std::vector<double> lines = loop(net, optimizer);
                      for (size_t i = 0; i < lines.size(); ++i) EXPECT_NEAR(lines[i], expected[i], 1e-5) << what << " " << technique << " line " << i;
                      unshard_all({wrapped.get()});
                      EXPECT_LT(largest_difference(weights_of(net), weights_of(whole)), 10 * parity) << what << " " << technique << " on " << ranks;
                    },
                    {.timeout = std::chrono::seconds(20)});
        }
      }
    }
  };
  using Parts = std::vector<at::Tensor>;
  const auto then = [](auto& optimizer, const auto& gradients) {
    gradients();
    optimizer.step();
  };
  const auto momentum_of = [](const Parts& parts) { return std::make_unique<torch::optim::SGD>(parts, torch::optim::SGDOptions(0.05).momentum(0.9)); };
  check("Adam", [](const Parts& parts) { return std::make_unique<torch::optim::Adam>(parts, 0.05); }, then);
  check("SGD", momentum_of, then);
  check("SGD by a closure", momentum_of, [](auto& optimizer, const auto& gradients) { optimizer.step(gradients); });
  check(
      "ours", [](const std::vector<nn::NamedParameter>& parts) { return std::make_unique<optim::AdamW>(std::vector{optim::ParameterGroup{parts}}); },
      [](auto& optimizer, const auto& gradients) {
        gradients();
        optimizer.step(0.05);
      });
}

}  // namespace
}  // namespace tessera
