#include "tests/zero/plain_loop.h"

#include <gmock/gmock.h>

#include "tessera/comm/collectives.h"
#include "tessera/nn/attach.h"
#include "tessera/zero/zero_optimizer.h"
#include "tests/zero/support.h"

/// zero_grad, forward, backward, step: the loop of a program on one device, with an optimizer made by zero_optimizer.
namespace tessera {
namespace {

using ::testing::HasSubstr;
using namespace testing_support;

TEST(ZeroPlainLoop, IsTheLoopOfOneProcess) {
  for (const auto& make : {make_sgd, make_adam}) {
    expect_parity(
        [](Net& net, const Loop& loop) {
          for (int step = 0; step < 4; ++step) {
            loop.zero_grad();
            backward(net, loop.mine(step));
            loop.step();
          }
        },
        make);
  }
}

TEST(ZeroPlainLoop, TheModelsZeroGradDoesToo) {
  for (const bool set_to_none : {true, false}) {
    expect_parity([&](Net& net, const Loop& loop) {
      for (int step = 0; step < 3; ++step) {
        const Batch batch = loop.mine(step);
        const at::Tensor loss = loss_of(net.forward(batch.x), batch.y, samples);
        net.zero_grad(set_to_none);
        loss.backward();
        loop.step();
      }
    });
  }
}

/// zero_grad of the model within an accumulation, after a step of which something is carried.
TEST(ZeroPlainLoop, TheModelsZeroGradClearsWhatIsCarried) {
  for (const bool set_to_none : {true, false}) {
    expect_parity([&](Net& net, const Loop& loop) {
      backward(net, loop.mine(0));
      {
        const Attachment local = loop.no_sync();
        backward(net, loop.mine(1));
      }
      net.zero_grad(set_to_none);
      backward(net, loop.mine(2));
      loop.step();
    });
  }
}

TEST(ZeroPlainLoop, WhatTheModelClearedNoOptimizerUsesAgain) {
  for (const bool set_to_none : {true, false}) {
    expect_parity([&](Net& net, const Loop& loop) {
      for (int step = 0; step < 2; ++step) {
        net.zero_grad(set_to_none);
        backward(net, loop.mine(step));
        loop.step();
      }
      net.zero_grad(set_to_none);
      loop.step();  // with nothing
      backward(net, loop.mine(2));
      for (at::Tensor parameter : net.first->parameters()) parameter.requires_grad_(false);
      for (int step = 3; step < 6; ++step) {
        net.zero_grad(set_to_none);
        backward(net, loop.mine(step));
        loop.step();
      }
    });
  }
}

TEST(ZeroPlainLoop, AccumulatesUnderNoSyncAndASecondPassAddsToTheFirst) {
  expect_parity([](Net& net, const Loop& loop) {
    for (int step = 0; step < 3; ++step) {
      loop.zero_grad();
      for (int pass = 0; pass < 3; ++pass) {
        const Attachment local = pass < 2 ? loop.no_sync() : Attachment();
        backward(net, part_of(loop.mine(step), 3, pass));
      }
      loop.step();
    }
    for (int step = 0; step < 2; ++step) {
      loop.zero_grad();
      for (int pass = 0; pass < 3; ++pass) backward(net, loop.mine(10 + 3 * step + pass));
      {
        const Attachment local = loop.no_sync();
        backward(net, loop.mine(20 + step));
      }
      backward(net, loop.mine(30 + step));
      loop.step();
    }
    backward(net, loop.mine(40));
    {
      const Attachment local = loop.no_sync();
      backward(net, loop.mine(41));
    }
    loop.zero_grad();  // within an accumulation
    backward(net, loop.mine(42));
    loop.step();
  });
}

/// `loop(net, zero_grad, step, no_sync, mine)` gives the weights of one device on two ranks of either stage, where zero_grad is the arrow's.
template <class LoopOf>
void expect_one_optimizers_loop(const LoopOf& loop, bool to_none, ZeroOptions options) {
  Net whole;
  const auto optimizer = make_sgd(whole.parameters());
  loop(
      whole, [&] { optimizer->zero_grad(to_none); }, [&] { optimizer->step(); }, [] { return Attachment(); },
      [](int64_t i) { return whole_batch(samples, i); });
  for (const int stage : {1, 2}) {
    options.stage = stage;
    run_ranks(2, [&](World& world) {
      Net net;
      ShardedDataParallel zero(net, groups_of(world, 1), options);
      auto parts = zero_optimizer(zero, make_sgd);
      loop(
          net, [&] { parts->zero_grad(to_none); }, [&] { parts.step(); }, [&] { return zero.no_sync(); },
          [&](int64_t i) { return part_of(whole_batch(samples, i), 2, world.rank()); });
      EXPECT_LT(largest_difference(weights_of(net), weights_of(whole)), 10 * parity) << "stage " << stage << " to none " << to_none;
    });
  }
}

/// optimizer->zero_grad() is the optimizer's over the parts; what passes under no_sync() left lies with the parameters.
TEST(ZeroPlainLoop, TheInnerOptimizersZeroGradClearsWhatWaits) {
  for (const bool to_none : {true, false}) {
    const auto loop = [&](Net& net, const auto& zero_grad, const auto& step, const auto& no_sync, const auto& mine) {
      backward(net, mine(0));  // which is carried
      for (int64_t i = 1; i < 4; ++i) {
        {
          const Attachment local = no_sync();
          backward(net, mine(10 * i));
        }
        zero_grad();
        backward(net, mine(i));
        step();
      }
    };
    expect_one_optimizers_loop(loop, to_none, {});
  }
}

/// What a complete step has left, and a pass under no_sync() has begun to add to without bringing more of it, is cleared by the arrow as well.
TEST(ZeroPlainLoop, TheOptimizersOwnZeroGradReachesWhatWasSetAside) {
  const auto loop = [&](Net& net, const auto& zero_grad, const auto& step, const auto& no_sync, const auto& mine) {
    const auto pass = [&](int64_t i, bool all) {
      const Batch batch = mine(i);
      const at::Tensor hidden = at::tanh(net.first(batch.x));
      (all ? net.forward(batch.x) : hidden).square().sum().div(static_cast<double>(samples)).backward();
    };
    for (int64_t i = 0; i < 3; ++i) {
      pass(3 * i, true);
      {
        const Attachment local = no_sync();
        pass(3 * i + 1, false);
      }
      zero_grad();
      pass(3 * i + 2, false);
      step();
    }
  };
  for (const bool to_none : {false, true}) {
    expect_one_optimizers_loop(loop, to_none, {.find_unused_parameters = true});
  }
}

TEST(ZeroPlainLoop, GradientsThatWaitAreNotStepped) {
  for (const int stage : {1, 2}) {
    run_ranks(2, [&](World& world) {
      Net net;
      ShardedDataParallel zero(net, groups_of(world, 1), {.stage = stage});
      auto optimizer = zero_optimizer(zero, make_sgd);
      const auto pass = [&](int64_t i) { backward(net, part_of(whole_batch(samples, i), 2, world.rank())); };
      {
        const Attachment local = zero.no_sync();
        pass(0);
      }
      const std::vector<at::Tensor> before = weights_of(net);
      EXPECT_THAT(refusal([&] { optimizer.step(); }), HasSubstr("waits whole on this rank, where no_sync() left it or the program put it (mutable_grad()"));
      EXPECT_THAT(refusal([&] { optimizer->step(); }), HasSubstr("waits whole on this rank, where no_sync() left it"));
      EXPECT_TRUE(same_bits(weights_of(net), before));
      optimizer.step([&] {  // which brings what is missing
        pass(1);
        return at::zeros({});
      });
      EXPECT_FALSE(same_bits(weights_of(net), before));
      const at::Tensor first = weights_of(net)[0];
      comm::broadcast(world.group(), first, 0);
      EXPECT_TRUE(same_bits({first}, {weights_of(net)[0]}));
    });
  }
}

TEST(ZeroPlainLoop, GradientsThatWaitAreNoNorm) {
  run_ranks(2, [&](World& world) {
    Net net;
    ShardedDataParallel zero(net, groups_of(world, 1), {.stage = 2});
    const auto ask = [&] { zero.refuse_gradients_that_wait("clip_grad_norm"); };
    {
      const Attachment local = zero.no_sync();
      backward(net, part_of(whole_batch(samples), 2, world.rank()));
    }
    EXPECT_THAT(refusal(ask), HasSubstr("clip_grad_norm: the gradient of 'scale' waits whole on this rank"));
    backward(net, part_of(whole_batch(samples), 2, world.rank()));
    EXPECT_NO_THROW(ask());
  });
}

}  // namespace
}  // namespace tessera
