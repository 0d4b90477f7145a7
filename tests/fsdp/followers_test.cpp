#include <functional>
#include <sstream>

#include <gmock/gmock.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/utils/convert_parameters.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>
#include <torch/serialize.h>

#include "support.h"

/// What is made by slices' sizes, or follows sharded parameters: averages, optimizers, their files.
namespace tessera {
namespace {

using comm::run_ranks;
using comm::World;
using ::testing::AllOf;
using ::testing::AnyOf;
using ::testing::HasSubstr;
using namespace testing_support;

/// libtorch's sentence would be about two sizes, and of one rank alone.
TEST(FullyShardLoop, WhatWasMadeByASlicesSizesIsRefusedByName) {
  const std::vector<Gate::Use> begins{[](auto&, auto& x, auto& g) { return x * at::zeros_like(g).sub_(g); },
                                      [](auto&, auto& x, auto& g) { return x * at::zeros_like(g).add_(g); }};
  for (const int ranks : {2, 3}) {
    run_ranks(ranks, [&](World& world) {
      for (const Gate::Use& begin : begins) {
        Gate net(2, begin);
        auto sharded = fully_shard(net, world.group(), {.wrap = "*"});
        const at::Tensor x = random_tensor({3, 2}, "x");
        EXPECT_THAT(refusal([&] { (void)begin(x, x, net.g); }), AllOf(HasSubstr("'g'"), HasSubstr("ones_like")));
      }
      for (const Gate::Use& use : std::vector<Gate::Use>{[](auto& h, auto& x, auto& g) { return h + x * (at::ones(g.sizes()) - g); },
                                                         [](auto&, auto& x, auto& g) { return x * (at::ones(g.sizes()) * g); }}) {
        Gate net(6, use);
        auto sharded = fully_shard(net, world.group(), {.wrap = "*"});
        net.eval();
        const at::NoGradGuard no_grad;
        const at::Tensor x = random_tensor({3, 6}, "x");
        EXPECT_THAT(refusal([&] { (void)use(at::tanh(net.in(x)), x, net.g); }), AllOf(HasSubstr("'g'"), HasSubstr("ones_like")));
      }
      Gate net(6, [](auto&, auto& x, auto& g) { return x * (at::ones_like(g) - g); });
      auto sharded = fully_shard(net, world.group(), {.wrap = "*"});
      net.eval();
      const at::NoGradGuard no_grad;
      const at::Tensor x = random_tensor({3, 6}, "x");  // and before any layer
      EXPECT_THAT(refusal([&] { (void)net.use(x, x, net.g); }), AllOf(HasSubstr("'g'"), HasSubstr("ones_like")));
    });
  }
}

/// Two encoders of one shape, one of which follows the other, and a layer more on one side.
struct Following : torch::nn::Module {
  explicit Following(bool more) {
    register_module("online", online);
    if (more) register_module("predictor", predictor);
    register_module("target", target);
    fill_parameters(*this);
    for (const at::Tensor& parameter : target->parameters()) at::Tensor(parameter).requires_grad_(false);
  }
  void follow(bool handles) {
    const at::NoGradGuard no_grad;
    const auto from = online->parameters(), to = target->parameters();
    for (size_t i = 0; i < to.size(); ++i) at::Tensor(to[i]).mul_(0.5).add_(handles ? from[i].detach() : from[i], 0.5);
  }
  torch::nn::Linear online{5, 7}, target{5, 7}, predictor{7, 4};
};

TEST(FullyShardLoop, WhatFollowsAnotherParameterHasItsRowsOrIsRefused) {
  for (const int ranks : {2, 3}) {
    for (const bool more : {false, true}) {
      for (const std::string wrap : {"", "*"}) {
        Following whole(more);
        whole.follow(false);
        const Gradients expected = named_values(whole);
        run_ranks(ranks, [&](World& world) {
          for (const bool handles : {false, true}) {
            Following net(more);
            auto sharded = fully_shard(net, world.group(), {.wrap = wrap});
            if (more && wrap.empty()) {
              // By data(), with gradients on, it looks like a forward; on a rank whose rows are as many it is not seen.
              const bool alike = net.target->weight.sizes() == net.online->weight.sizes();
              const auto by_data = refusal([&] { net.target->weight.data().mul_(0.5).add_(net.online->weight.data(), 0.5); });
              if (!alike) EXPECT_THAT(by_data, HasSubstr("(a moving average), wrap each of the two by a fully_shard of its own"));
              EXPECT_THAT(refusal([&] { net.follow(false); }), AllOf(HasSubstr("'target.weight'"), HasSubstr("'online.weight'")));
            } else {
              net.follow(handles);
              EXPECT_LT(slice_difference(net, expected, /*values=*/true), parity);
            }
          }
        });
      }
    }
  }
}

/// A wrapper for each, cut alike. By lists (foreach) as by single tensors: what stands side by side in two lists belongs together, and nothing else does.
TEST(FullyShardLoop, AnAverageFollowsByListsAsByTensors) {
  using List = std::vector<at::Tensor>;
  const std::vector<std::function<void(const List& to, const List& from)>> follows{[](const List& to, const List& from) {
                                                                                     at::_foreach_mul_(to, 0.5);
                                                                                     at::_foreach_add_(to, from, 0.25);
                                                                                   },
                                                                                   [](const List& to, const List& from) { at::_foreach_lerp_(to, from, 0.5); },
                                                                                   [](const List& to, const List& from) { at::_foreach_copy_(to, from); },
                                                                                   [](const List& to, const List& from) {
                                                                                     for (size_t i = 0; i < to.size(); ++i)
                                                                                       at::Tensor(to[i]).lerp_(from[i], 0.5);
                                                                                   }};
  struct Pair {
    explicit Pair(int64_t seed) : net(true) { fill_parameters(net, seed); }
    Patches net;
    at::Tensor scale = net.register_parameter("zero_dim", at::full({}, 0.5));
  };
  for (const auto& follow : follows) {
    Pair whole(1), average(2);
    {
      const at::NoGradGuard no_grad;
      follow(average.net.parameters(), whole.net.parameters());
    }
    const Gradients expected = named_values(average.net);
    for (const int ranks : {1, 2, 3}) {
      for (const std::string wrap : {"", "*"}) {
        for (const bool training : {true, false}) {
          run_ranks(ranks,
                    [&](World& world) {
                      Pair from(1), to(2);
                      const auto sharded = fully_shard(from.net, world.group(), {.wrap = wrap}), followed = fully_shard(to.net, world.group(), {.wrap = wrap});
                      from.net.train(training);
                      const at::NoGradGuard no_grad;
                      follow(to.net.parameters(), from.net.parameters());
                      EXPECT_LT(slice_difference(to.net, expected, /*values=*/true), parity);
                    },
                    {.timeout = std::chrono::seconds(20)});
        }
      }
    }
  }
}

/// One rank has all rows of each of them, and takes a list of whole tensors for slices.
TEST(FullyShardLoop, AListOfWholesBesideParametersOfOneRankIsRefusedOnTheOthers) {
  run_ranks(2,
            [](World& world) {
              Patches net(true);
              const auto sharded = fully_shard(net, world.group(), {.wrap = "*"});
              const at::NoGradGuard no_grad;
              const std::vector<at::Tensor> average{at::zeros({1, 5, 4})}, followed{net.positions};
              EXPECT_THAT(refusal([&] { (void)(net.patch->weight * 0.5); }), HasSubstr("average.mul_(decay).add_(parameter, 1 - decay)"));
              EXPECT_THAT(refusal([&] { torch::nn::utils::parameters_to_vector(net.parameters()); }), HasSubstr("fully_shard: aten::view was given"));
              const bool here = nn::slice_of(net.positions).numel() > 0;
              if (here) return at::_foreach_add_(average, followed);
              EXPECT_THAT(refusal([&] { at::_foreach_add_(average, followed); }), HasSubstr("'positions'"));
            },
            {.timeout = std::chrono::seconds(20)});
}

/// Handles that were made while a line for the log had parameters whole: the list that ends that forward gets slices in their place.
TEST(FullyShardLoop, AListOfHandlesThatWereWholeEndsAForwardWithSlices) {
  for (const int ranks : {2, 3}) {
    run_ranks(ranks,
              [](World& world) {
                ScaledLayer net;
                const auto sharded = fully_shard(net, world.group(), {.average = true});
                std::vector<at::Tensor> averages, expected, handles;
                for (const at::Tensor& parameter : net.parameters()) {
                  expected.push_back(parameter.detach() * 0.5);
                  averages.push_back(at::zeros_like(parameter.detach()));
                }
                net.forward(random_tensor({4, 5}, "x")).square().sum().backward();
                (void)net.scale.exp().item<double>();
                const at::NoGradGuard no_grad;
                for (const at::Tensor& parameter : net.parameters()) handles.push_back(parameter.data());
                EXPECT_EQ(handles[1].sizes(), at::IntArrayRef({3, 5})) << "whole";
                at::_foreach_add_(averages, handles, 0.5);
                EXPECT_TRUE(same_bits(averages, expected));
              },
              {.timeout = std::chrono::seconds(20)});
  }
}

/// Each wrapped by itself, but the one as a part of more: the rows of like parameters differ.
TEST(FullyShardLoop, WhatFollowsAModuleThatIsCutOtherwiseIsToldHowToCutIt) {
  run_ranks(2, [&](World& world) {
    struct Both : torch::nn::Module {
      Both() {
        register_module("before", before);
        register_module("online", online);
      }
      torch::nn::Linear before{5, 7}, online{5, 4};
    } both;
    torch::nn::Linear target(5, 4);
    fill_parameters(both);
    fill_parameters(*target);
    const auto sharded = fully_shard(both, world.group()), followed = fully_shard(target, world.group());
    ASSERT_NE(both.online->weight.sizes(), target->weight.sizes());
    const at::NoGradGuard no_grad;
    EXPECT_THAT(refusal([&] { target->weight.mul_(0.5).add_(both.online->weight, 0.5); }),
                AllOf(HasSubstr("aten::add_ writes 'weight'"), HasSubstr("from 'online.weight'"),
                      HasSubstr("(a moving average), wrap each of the two by a fully_shard of its own")));
    EXPECT_THAT(
        refusal([&] { target->weight.copy_(at::ones({4, 5})); }),
        AllOf(HasSubstr("aten::copy_ writes 'weight' of shape [4, 5]"), HasSubstr("(a moving average), wrap each of the two by a fully_shard of its own")));
  });
}

/// What was frozen when it was wrapped lies apart from the rest, so the cuts differ, and on some ranks slices have one shape by chance: all ranks refuse, and
/// none begins a gather that the others do not.
TEST(FullyShardLoop, WhatFollowsAModuleThatWasFrozenOtherwiseIsRefusedOnEveryRank) {
  struct Two : torch::nn::Module {
    Two() {
      a = register_parameter("a", at::empty({3, 3}));
      b = register_parameter("b", at::empty({3, 3}));
      fill_parameters(*this);
    }
    at::Tensor a, b;
  };
  for (const int ranks : {2, 3}) {
    for (const bool frozen : {false, true}) {
      for (const bool lists : {false, true}) {
        run_ranks(ranks,
                  [&](World& world) {
                    Two model, copy;
                    (frozen ? model : copy).a.requires_grad_(false);
                    const auto sharded = fully_shard(model, world.group()), followed = fully_shard(copy, world.group());
                    const at::NoGradGuard no_grad;
                    const auto from = model.parameters(), to = copy.parameters();
                    const auto follow = [&] {
                      if (lists) return at::_foreach_add_(to, from);
                      for (size_t i = 0; i < to.size(); ++i) at::Tensor(to[i]).mul_(0).add_(from[i], 1);
                    };
                    EXPECT_THAT(refusal(follow), AllOf(AnyOf(HasSubstr("writes 'a' of one wrapper from 'a' of another"),
                                                             HasSubstr("writes 'b' of one wrapper from 'b' of another")),
                                                       HasSubstr("the same parameters frozen")));
                  },
                  {.timeout = std::chrono::seconds(20)});
      }
    }
  }
}

/// State that is made with the optimizer, or by a step, of what was whole then.
TEST(FullyShardLoop, AnOptimizerFromBeforeTheWrapperIsRefusedByItsState) {
  using Optimizer = std::unique_ptr<torch::optim::Optimizer>;
  using Parameters = std::vector<at::Tensor>;
  const std::vector<std::function<Optimizer(Parameters)>> makes{
      [](Parameters p) { return std::make_unique<torch::optim::Adam>(p, torch::optim::AdamOptions(0.01).weight_decay(0.1)); },
      [](Parameters p) { return std::make_unique<torch::optim::AdamW>(p, torch::optim::AdamWOptions(0.01)); },
      [](Parameters p) { return std::make_unique<torch::optim::SGD>(p, torch::optim::SGDOptions(0.01).momentum(0.9)); },
      [](Parameters p) { return std::make_unique<torch::optim::RMSprop>(p, torch::optim::RMSpropOptions(0.01)); },
      [](Parameters p) { return std::make_unique<torch::optim::Adagrad>(p, torch::optim::AdagradOptions(0.01)); }};
  for (const auto& make : makes) {
    for (const auto trigger : kBoth) {
      for (const int ranks : {2, 7}) {  // of seven each has one row, which fits any state
        run_ranks(ranks, [&](World& world) {
          nn::Linear net(nn::LinearOptions(5, 7).bias(false));
          fill_parameters(*net);
          const auto early = make(net->parameters());
          const auto pass = [&] {
            early->zero_grad();
            net(whole_batch(samples).x).square().sum().backward();
          };
          pass();
          early->step();
          const auto sharded = fully_shard(net, world.group(), {.trigger = trigger});
          pass();
          EXPECT_THAT(refusal([&] { early->step(); }), AllOf(HasSubstr("slice"), HasSubstr("'weight'"),
                                                             HasSubstr("was made, or has stepped, before fully_shard"), HasSubstr("checkpoint::load")));
          const auto late = make(net->parameters());
          late->step();
        });
      }
    }
  }
}

/// Where rank 0 has all rows, its state has the sizes of a whole one, too.
TEST(FullyShardLoop, AnOptimizersFileOfAnotherRankIsRefusedAsThat) {
  for (const auto trigger : kBoth) {
    for (const double decay : {0.0, 0.1}) {
      for (const int64_t rows : {7, 1}) {
        std::string file;
        run_ranks(2, [&](World& world) {
          nn::Linear net(nn::LinearOptions(5, rows).bias(false));
          fill_parameters(*net);
          const auto sharded = fully_shard(net, world.group(), {.trigger = trigger});
          torch::optim::Adam optimizer(net->parameters(), torch::optim::AdamOptions(0.01).weight_decay(decay));
          const auto pass = [&] {
            optimizer.zero_grad();
            net(whole_batch(samples).x).square().sum().backward();
          };
          pass();
          optimizer.step();
          if (world.rank() == 0) {
            std::stringstream out;
            torch::save(optimizer, out);
            file = out.str();
          }
          pass();  // behind the file, for each rank waits for the other
          std::stringstream in(file);
          torch::load(optimizer, in);
          if (world.rank() == 0) {
            optimizer.step();
            return;
          }
          EXPECT_THAT(refusal([&] { optimizer.step(); }),
                      AllOf(HasSubstr("'weight'"), HasSubstr("the state of another rank's part"), HasSubstr("checkpoint::load")));
        });
      }
    }
  }
}

}  // namespace
}  // namespace tessera
