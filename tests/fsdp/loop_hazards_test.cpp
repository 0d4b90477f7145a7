#include <functional>
#include <limits>
#include <vector>

#include <gmock/gmock.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/nn/utils/clip_grad.h>
#include <torch/optim/sgd.h>

#include "support.h"
#include "tessera/nn/attach.h"
#include "tessera/nn/gradient_dispatcher.h"

/// What programs do around a loop over sharded modules that would part ranks without a word: it is right, or it is refused by name.
namespace tessera {
namespace {

using comm::run_ranks;
using comm::World;
using ::testing::AllOf;
using ::testing::HasSubstr;
using namespace testing_support;

/// What autograd::grad returns is whole, and of one rank's samples.
TEST(FullyShardLoop, AGradientThatTheProgramAssignsIsRefusedByName) {
  for (const auto trigger : kBoth) {
    run_ranks(2, [&](World& world) {
      DeepNet net;
      auto sharded = fully_shard(net, world.group(), {.wrap = "block*", .trigger = trigger});
      const std::vector<at::Tensor> some{net->first->weight, net->last->bias};
      torch::optim::SGD optimizer(some, 0.1);
      const Batch mine = part_of(whole_batch(samples), 2, world.rank());
      const auto gradients = torch::autograd::grad({loss_of(net(mine.x), mine.y, samples)}, some);
      for (size_t i = 0; i < some.size(); ++i) some[i].mutable_grad() = gradients[i];
      const auto said =
          AllOf(HasSubstr("fully_shard: the gradient of '"), HasSubstr("by the program (before fully_shard, by mutable_grad(), or of torch::autograd::grad)"));
      EXPECT_THAT(refusal([&] { optimizer.step(); }), said);
      EXPECT_THAT(refusal([&] { backward_of(net, mine); }), said);
      DeepNet trained;
      backward_of(trained, mine);
      sharded = fully_shard(trained, world.group(), {.wrap = "block*", .trigger = trigger});
      EXPECT_THAT(refusal([&] { (void)sharded->norm_group(); }), said) << "gradients of an earlier step are whole";
      trained->zero_grad();
      EXPECT_NO_THROW(backward_of(trained, mine));
      EXPECT_NO_THROW((void)sharded->norm_group());
    });
  }
}

/// Of a generator and its discriminator, or an actor and its critic: who is frozen for one term of a loss learns from the others.
struct Adversaries : torch::nn::Module {
  Adversaries() {
    register_module("g", g);
    register_module("d", d);
    register_module("e", e);
    fill_parameters(*this, 3);
  }
  at::Tensor judge(const at::Tensor& x) { return e(at::tanh(d(x))); }
  void freeze(bool generator, bool frozen) {
    for (const auto& item : named_parameters()) {
      if (item.key().starts_with("g.") == generator) item.value().set_requires_grad(!frozen);
    }
  }
  torch::nn::Linear g{3, 4}, d{4, 5}, e{5, 1};
};

using Terms = std::function<at::Tensor(Adversaries& net, const at::Tensor& noise, const at::Tensor& real)>;

const std::vector<std::pair<std::string, Terms>>& terms_with_frozen_parts() {
  const auto loss = [](const at::Tensor& x) { return at::softplus(x).sum(); };
  static const std::vector<std::pair<std::string, Terms>> all{
      {"the critic at first",
       [loss](auto& net, auto& noise, auto& real) {
         net.freeze(false, true);
         const at::Tensor actor = loss(-net.judge(net.g(noise)));
         net.freeze(false, false);
         return actor + loss(net.judge(real));
       }},
      {"the generator at first",
       [loss](auto& net, auto& noise, auto& real) {
         net.freeze(true, true);
         const at::Tensor fake = net.g(noise);
         net.freeze(true, false);
         return loss(net.judge(real)) + loss(net.judge(fake)) + loss(-net.judge(net.g(noise)));
       }},
      {"the critic last",
       [loss](auto& net, auto& noise, auto& real) {
         const at::Tensor critic = loss(net.judge(real));
         net.freeze(false, true);
         return critic + loss(-net.judge(net.g(noise)));
       }},
      {"the critic behind slopes",
       [loss](auto& net, auto& noise, auto& real) {
         const at::Tensor fake = net.g(noise), slopes = torch::autograd::grad({loss(fake)}, {net.g->weight}, {}, true, false)[0];
         net.freeze(false, true);
         const at::Tensor actor = loss(-net.judge(fake)) + slopes.sum();
         net.freeze(false, false);
         return actor + loss(net.judge(real));
       }},
  };
  return all;
}

TEST(FullyShardLoop, WhatIsFrozenForATermOfALossLearnsFromTheOthers) {
  constexpr int64_t kRows = 6;
  const at::Tensor noise = at::linspace(-1, 1, 3 * kRows).view({kRows, 3}), real = at::linspace(-2, 1, 4 * kRows).view({kRows, 4}).cos();
  for (const auto& [name, terms] : terms_with_frozen_parts()) {
    Adversaries whole;
    terms(whole, noise, real).backward();
    Gradients expected;
    for (const auto& item : whole.named_parameters()) expected[item.key()] = item.value().grad();
    for (const int ranks : {2, 3}) {
      for (const char* const wrap : {"", "d", "g", "*"}) {
        for (const bool unused : {false, true}) {
          SCOPED_TRACE(::testing::Message() << name << ", " << ranks << " ranks, wrap '" << wrap << "', find_unused_parameters " << unused);
          run_ranks(ranks, [&, &terms = terms](World& world) {
            Adversaries net;
            const auto sharded = fully_shard(net, world.group(), {.wrap = wrap, .find_unused_parameters = unused});
            const int64_t rows = kRows / ranks, first = world.rank() * rows;
            for (int step = 0; step < 2; ++step) {
              net.zero_grad();
              net.freeze(false, false);
              terms(net, noise.narrow(0, first, rows), real.narrow(0, first, rows)).backward();
              EXPECT_LT(slice_difference(net, expected), 20 * parity) << step;
            }
          });
        }
      }
    }
  }
}

/// What is trained is reduced together, and a gradient that waits would stay behind.
TEST(FullyShardLoop, WhatIsFrozenWhileItsGradientWaitsIsRefusedByName) {
  for (const bool cleared : {false, true}) {
    run_ranks(2, [&](World& world) {
      DeepNet net;
      auto sharded = fully_shard(net, world.group(), {.wrap = "block*", .reduce_each_micro_batch = false});
      const Batch mine = part_of(whole_batch(samples), 2, world.rank());
      {
        const Attachment held = sharded->no_sync();
        backward_of(net, mine);
      }
      if (cleared) net->zero_grad();
      net->first->weight.set_requires_grad(false);
      if (cleared) {
        EXPECT_NO_THROW(backward_of(net, mine));
      } else {
        EXPECT_THAT(refusal([&] { backward_of(net, mine); }), HasSubstr("'first.weight' was frozen while its gradient waits whole on this rank"));
      }
    });
  }
}

TEST(FullyShardLoop, LibtorchsClippingIsRefused) {
  for (const auto trigger : kBoth) {
    run_ranks(2, [&](World& world) {
      DeepNet net;
      auto sharded = fully_shard(net, world.group(), {.wrap = "block*", .trigger = trigger});
      auto optimizer = momentum(*net);
      for (int step = 0; step < 2; ++step) {
        optimizer.zero_grad();
        backward_of(net, part_of(whole_batch(samples, step), 2, world.rank()));
        const Gradients before = named_gradients(*net);
        EXPECT_THAT(refusal([&] { torch::nn::utils::clip_grad_norm_(net->parameters(), 0.1); }), HasSubstr("tessera::clip_grad_norm"));
        EXPECT_THAT(refusal([&] { torch::nn::utils::clip_grad_norm_(net->parameters(), 0.1, std::numeric_limits<double>::infinity()); }),
                    HasSubstr("tessera::clip_grad_norm"));
        for (const auto& parameter : nn::unique_parameters(*net)) {
          if (before.at(parameter.name).defined()) EXPECT_TRUE(at::equal(parameter.tensor.grad(), before.at(parameter.name))) << parameter.name;
        }
        torch::nn::utils::clip_grad_value_(net->parameters(), 0.05);  // goes by elements
        optimizer.step();
      }
    });
  }
}

/// Slices are whole rows, whose norms are those of the whole (clipping by units, normalised gradients).
TEST(FullyShardLoop, NormsOfAGradientsRowsAreThisRanks) {
  for (const int ranks : {2, 3}) {
    run_ranks(ranks, [&](World& world) {
      DeepNet whole, net;
      backward_of(whole, whole_batch(samples));
      auto sharded = fully_shard(net, world.group());
      backward_of(net, part_of(whole_batch(samples), ranks, world.rank()));
      const at::Tensor gradient = net->last->weight.grad(), rows = take(whole->last->weight.grad(), nn::slice_of(net->last->weight));
      const at::Tensor norms = rows.square().sum(1, true).sqrt();
      EXPECT_LT(largest_difference({gradient.norm(2, 1, true)}, {norms}), parity);
      EXPECT_LT(largest_difference({at::linalg_vector_norm(gradient.detach(), 2, at::OptionalIntArrayRef({-1}), true)}, {norms}), parity);
      for (const auto& norm : std::vector<std::function<void()>>{[&] { (void)gradient.norm(2, 0, true); }, [&] { (void)gradient.norm(2, {0, 1}, true); },
                                                                 [&] { (void)gradient.t().norm(2, 1, true); }, [&] { (void)gradient.norm(); }}) {
        EXPECT_THAT(refusal(norm), HasSubstr("a norm of slices"));
      }
    });
  }
}

/// Ranks whose losses leave out the last unit, which all have called: in a step the collectives are the same, and all ranks refuse.
struct EarlyExitImpl : nn::Module {
  EarlyExitImpl() : first(5, 7), second(7, 7), third(7, 7) {
    register_module("first", first);
    register_module("second", second);
    register_module("third", third);
    fill_parameters(*this);
  }
  std::pair<at::Tensor, at::Tensor> forward(const at::Tensor& x) {
    const at::Tensor h = at::tanh(second(at::tanh(first(x))));
    return {h, third(h)};
  }
  nn::Linear first, second, third;
};
TESSERA_MODULE(EarlyExit);

TEST(FullyShardLoop, CollectivesDoNotFollowWhatArrives) {
  run_ranks(2,
            [&](World& world) {
              EarlyExit net;
              auto sharded = fully_shard(net, world.group(), {.wrap = "*", .prefetch = {.units = 0}});
              const auto [early, late] = net(random_tensor({4, 5}, "x"));
              const at::Tensor loss = world.rank() == 0 ? early.sum() + late.sum() : early.sum();
              const std::string said = refusal([&] { loss.backward(); });
              EXPECT_THAT(said, HasSubstr("on rank 1 of world"));
              EXPECT_THAT(said, HasSubstr("got no gradient in this step"));
            },
            {.timeout = std::chrono::seconds(20)});
}

TEST(FullyShardLoop, LookingAtAGradientLeavesWhatIsHeld) {
  for (const auto trigger : kBoth) {
    for (const bool before : {false, true}) {  // there is a gradient already
      const auto loop = [&](DeepNet& net, const auto& batch, FullyShardedDataParallel* sharded) {
        if (before) backward_of(net, batch(5));
        for (int held = 0; held < 2; ++held) {
          const Attachment hold = sharded ? sharded->no_sync() : Attachment();
          backward_of(net, batch(held));
          const at::Tensor x = batch(3).x.clone().requires_grad_();
          torch::autograd::grad({net(x).sum()}, {x});
        }
        const at::Tensor x = batch(3).x.clone().requires_grad_();
        torch::autograd::grad({net(x).sum()}, {x});
        backward_of(net, batch(2));
      };
      DeepNet whole;
      loop(whole, [](int step) { return whole_batch(samples, step); }, nullptr);
      const Gradients expected = named_gradients(*whole);
      run_ranks(2, [&](World& world) {
        DeepNet net;
        auto sharded = fully_shard(net, world.group(), {.wrap = "block*", .reduce_each_micro_batch = false, .trigger = trigger});
        loop(net, [&](int step) { return part_of(whole_batch(samples, step), 2, world.rank()); }, sharded.get());
        EXPECT_LT(slice_difference(*net, expected), 20 * parity);
      });
    }
  }
}

TEST(FullyShardLoop, WhatIsHeldIsNotStepped) {
  for (const auto trigger : kBoth) {
    DeepNet whole;
    auto optimizer = momentum(*whole);
    optimizer.zero_grad();
    backward_of(whole, whole_batch(samples, 0));
    backward_of(whole, whole_batch(samples, 1));
    optimizer.step();
    const Gradients expected = named_values(*whole);
    run_ranks(2, [&](World& world) {
      DeepNet net;
      auto sharded = fully_shard(net, world.group(), {.wrap = "block*", .reduce_each_micro_batch = false, .trigger = trigger});
      auto own = momentum(*net);
      own.zero_grad();
      {
        const Attachment hold = sharded->no_sync();
        backward_of(net, part_of(whole_batch(samples, 0), 2, world.rank()));
      }
      EXPECT_THAT(refusal([&] { own.step(); }), HasSubstr("no_sync()"));
      EXPECT_THAT(refusal([&] { torch::nn::utils::clip_grad_norm_(net->parameters(), 0.1); }), HasSubstr("no_sync()"));
      EXPECT_THAT(refusal([&] { sharded->norm_group(); }), HasSubstr("no_sync()"));
      EXPECT_THAT(refusal([&] {
                    const at::NoGradGuard no_grad;
                    net->first->weight.grad().div_(2);
                  }),
                  HasSubstr("no_sync()"));
      backward_of(net, part_of(whole_batch(samples, 1), 2, world.rank()));
      own.step();
      EXPECT_LT(slice_difference(*net, expected, /*values=*/true), 10 * parity);
    });
  }
}

TEST(FullyShardLoop, AWrapperOfOneRankOwnsItsParameters) {
  run_ranks(1, [&](World& world) {
    DeepNet net;
    auto sharded = fully_shard(net, world.group(), {.wrap = "block*"});
    const auto* const dispatcher = nn::GradientDispatcher::find(net->first->weight);
    ASSERT_NE(dispatcher, nullptr);
    EXPECT_EQ(dispatcher->owner(), sharded.get());
    sharded.reset();
    EXPECT_EQ(dispatcher->owner(), nullptr);
  });
}

/// Each gathers where a pass first needs it: gathers of two wrappers would meet, whatever their sizes.
TEST(FullyShardLoop, TwoWrappersThatRanksComeToInDifferentOrdersAreRefusedOnAllRanks) {
  for (const int ranks : {2, 3}) {
    for (const bool other_order : {false, true}) {
      run_ranks(ranks, [&](World& world) {
        DeepNet student, teacher;
        auto one = fully_shard(student, world.group(), {.wrap = "block*", .find_unused_parameters = true});
        auto other = fully_shard(teacher, world.group(), {.wrap = "block*", .find_unused_parameters = true});
        const Batch mine = part_of(whole_batch(samples), ranks, world.rank());
        const auto run = [&] {
          const bool turned = other_order && world.rank() == ranks - 1;
          const at::Tensor y = turned ? teacher(mine.x) : student(mine.x), z = turned ? student(mine.x) : teacher(mine.x);
          (y * z).sum().backward();
        };
        if (!other_order) return run();
        EXPECT_THAT(run, ::testing::ThrowsMessage<ConfigError>(AllOf(HasSubstr("comes first to the wrapper of"), HasSubstr("in one order on all ranks"))));
      });
    }
  }
}

/// A failed pass leaves no marks: what nobody uses afterwards has no gradient.
TEST(FullyShardLoop, AFailedPassUsedNothing) {
  run_ranks(2, [&](World& world) {
    DeepNet net;
    auto sharded = fully_shard(net, world.group(), {.wrap = "block*", .find_unused_parameters = true});
    const Batch mine = part_of(whole_batch(samples), 2, world.rank());
    const at::Tensor x = mine.x.clone().requires_grad_();
    x.register_hook([](const at::Tensor&) { throw std::runtime_error("stop"); });
    EXPECT_THROW(loss_of(net(x), mine.y, samples).backward(), std::runtime_error);
    net->skipped = &net->blocks[1];
    net->zero_grad();
    backward_of(net, mine);
    EXPECT_FALSE(net->blocks[1]->w1->weight.grad().defined());
    EXPECT_TRUE(net->blocks[0]->w1->weight.grad().defined());
  });
}

/// What the program had before the pass is there again as soon as the exception is caught.
TEST(FullyShardLoop, AFailedSecondPassLeavesTheFirstsGradients) {
  for (const auto trigger : kBoth) {
    run_ranks(2, [&](World& world) {
      DeepNet net;
      auto sharded = fully_shard(net, world.group(), {.wrap = "block*", .trigger = trigger});
      const Batch mine = part_of(whole_batch(samples), 2, world.rank());
      backward_of(net, mine);
      const Gradients before = named_gradients(*net);
      const at::Tensor x = mine.x.clone().requires_grad_();
      x.register_hook([](const at::Tensor&) { throw std::runtime_error("stop"); });
      EXPECT_THROW(loss_of(net(x), mine.y, samples).backward(), std::runtime_error);
      for (const auto& [name, gradient] : named_gradients(*net)) {
        ASSERT_EQ(gradient.defined(), before.at(name).defined()) << name;
        EXPECT_TRUE(!gradient.defined() || at::equal(gradient, before.at(name))) << name;
      }
    });
  }
}

}  // namespace
}  // namespace tessera
