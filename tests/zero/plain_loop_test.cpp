#include <chrono>
#include <functional>
#include <latch>
#include <sstream>

#include <gmock/gmock.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/utils/clip_grad.h>
#include <torch/nn/utils/convert_parameters.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/lbfgs.h>
#include <torch/optim/schedulers/step_lr.h>
#include <torch/optim/sgd.h>
#include <torch/serialize.h>

#include "tessera/comm/collectives.h"
#include "tessera/nn/attach.h"
#include "tessera/nn/gradient_guard.h"
#include "tessera/zero/zero_optimizer.h"
#include "tests/zero/support.h"

/// zero_grad, forward, backward, step: the loop of a program on one device, with an optimizer made by zero_optimizer.
namespace tessera {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using namespace testing_support;

using Torch = torch::optim::Optimizer;
using MakeOptimizer = std::function<std::unique_ptr<Torch>(const std::vector<at::Tensor>&)>;

std::unique_ptr<Torch> make_sgd(const std::vector<at::Tensor>& parts) {
  return std::make_unique<torch::optim::SGD>(parts, torch::optim::SGDOptions(0.05).momentum(0.9));
}

std::unique_ptr<Torch> make_adam(const std::vector<at::Tensor>& parts) { return std::make_unique<torch::optim::Adam>(parts, torch::optim::AdamOptions(1e-2)); }

std::vector<at::Tensor> weights_of(const torch::nn::Module& module) {
  std::vector<at::Tensor> weights;
  for (const at::Tensor& parameter : module.parameters()) weights.push_back(parameter.detach().clone());
  return weights;
}

/// What a program is written against, with a wrapper and without.
struct Loop {
  std::function<void()> zero_grad, step;
  std::function<Attachment()> no_sync = [] { return Attachment(); };
  std::function<Batch(int64_t step)> mine;
};

struct Layout {
  int ranks, replicas;
};

/// Runs a program on one process, and under every way of ShardedDataParallel; holds the weights against each other.
void expect_parity(const std::function<void(Net&, const Loop&)>& train, const MakeOptimizer& make = make_sgd, const std::function<void(Net&)>& prepare = {}) {
  Net reference;
  if (prepare) prepare(reference);
  const auto optimizer = make(reference.parameters());
  train(reference,
        {.zero_grad = [&] { optimizer->zero_grad(); }, .step = [&] { optimizer->step(); }, .mine = [](int64_t step) { return whole_batch(samples, step); }});
  for (const auto& [ranks, replicas] : {Layout{1, 1}, Layout{2, 1}, Layout{3, 1}, Layout{4, 2}}) {
    for (const Way& way : ways) {
      std::vector<std::vector<at::Tensor>> weights(ranks);
      run_ranks(ranks, [&, ranks = ranks, replicas = replicas](World& world) {
        Net net;
        if (prepare) prepare(net);
        ShardedDataParallel zero(net, groups_of(world, replicas), options_of(way));
        auto optimizer = zero_optimizer(zero, make);
        train(net, {.zero_grad = [&] { optimizer.zero_grad(); },
                    .step = [&] { optimizer.step(); },
                    .no_sync = [&] { return zero.no_sync(); },
                    .mine = [&](int64_t step) { return part_of(whole_batch(samples, step), ranks, world.rank()); }});
        weights[world.rank()] = weights_of(net);
        for (const at::Tensor& parameter : net.parameters()) at::Tensor(parameter).requires_grad_(false);  // before its destruction
      });
      for (int rank = 1; rank < ranks; ++rank) EXPECT_TRUE(same_bits(weights[rank], weights[0])) << "rank " << rank << " of " << ranks;
      EXPECT_LT(largest_difference(weights[0], weights_of(reference)), 10 * parity) << ranks << " ranks, stage " << way.stage;
    }
  }
}

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

/// zero_grad(set_to_none = false) leaves zeros, with which an optimizer goes on (momentum, weight decay), also where the next loss leaves the parameter out.
TEST(ZeroPlainLoop, ZerosAreAGradientOfWhatNobodyUses) {
  enum class Cleared { Before, WithinAccumulation, BeforeAFailure };
  const auto run = [](Net& net, Cleared cleared, const std::function<Batch(int64_t)>& mine, const std::function<Attachment()>& no_sync,
                      const std::function<void()>& step) {
    const auto without_middle = [&](const Batch& batch) { loss_of(net.last(at::tanh(net.first(batch.x))), batch.y, samples).backward(); };
    backward(net, mine(0));
    step();
    if (cleared == Cleared::WithinAccumulation) {
      const Attachment local = no_sync();
      without_middle(mine(1));
    }
    net.zero_grad(/*set_to_none=*/false);
    if (cleared == Cleared::BeforeAFailure && no_sync) {
      const at::Tensor x = mine(1).x.clone().requires_grad_();
      x.register_hook([](const at::Tensor&) { throw std::runtime_error("stop"); });
      EXPECT_THROW(loss_of(net.forward(x), mine(1).y, samples).backward(), std::runtime_error);
    }
    without_middle(mine(2));
    step();
  };
  for (const auto cleared : {Cleared::Before, Cleared::WithinAccumulation, Cleared::BeforeAFailure}) {
    Net whole;
    torch::optim::SGD alone(whole.parameters(), torch::optim::SGDOptions(0.05).momentum(0.9).weight_decay(0.01));
    const auto everything = [](int64_t step) { return whole_batch(samples, step); };
    if (cleared == Cleared::BeforeAFailure) {
      run(whole, Cleared::Before, everything, {}, [&] { alone.step(); });
    } else {
      run(whole, cleared, everything, [] { return Attachment(); }, [&] { alone.step(); });
    }
    for (const int stage : {1, 2}) {
      run_ranks(3, [&](World& world) {
        Net net;
        ShardedDataParallel zero(net, {.shard = world.group()}, {.stage = stage, .sizes = small_buckets, .find_unused_parameters = true});
        auto optimizer = zero_optimizer(zero, [](const std::vector<at::Tensor>& parts) {
          return std::make_unique<torch::optim::SGD>(parts, torch::optim::SGDOptions(0.05).momentum(0.9).weight_decay(0.01));
        });
        run(
            net, cleared, [&](int64_t step) { return part_of(whole_batch(samples, step), 3, world.rank()); }, [&] { return zero.no_sync(); },
            [&] { optimizer.step(); });
        EXPECT_LT(largest_difference(net.parameters(), whole.parameters()), 10 * parity) << "stage " << stage << ", " << static_cast<int>(cleared);
      });
    }
  }
}

/// torch::load, set_data and vector_to_parameters give a parameter another storage than the bucket's.
TEST(ZeroPlainLoop, WeightsMayBeLoadedAfterWrapping) {
  Net saved;
  {
    const at::NoGradGuard no_grad;
    for (at::Tensor parameter : saved.parameters()) parameter.mul_(2);
  }
  std::stringstream file;
  torch::save(std::shared_ptr<Net>(&saved, [](Net*) {}), file);
  const auto load = [&](Net& net) {
    std::stringstream copy(file.str());
    auto handle = std::shared_ptr<Net>(&net, [](Net*) {});
    torch::load(handle, copy);
  };
  const auto halve = [](Net& net) {
    std::vector<at::Tensor> halves;
    for (const at::Tensor& parameter : net.parameters()) halves.push_back(parameter.detach() * 0.5);
    torch::nn::utils::vector_to_parameters(torch::nn::utils::parameters_to_vector(halves), net.parameters());
  };
  const auto step = [](Net& net, const Loop& loop, int64_t i) {
    loop.zero_grad();
    backward(net, loop.mine(i));
    loop.step();
  };
  expect_parity([&](Net& net, const Loop& loop) {
    load(net);
    step(net, loop, 0);
    step(net, loop, 1);
    halve(net);  // between steps
    step(net, loop, 2);
    backward(net, loop.mine(3));
    load(net);  // between the gradient and the update
    loop.step();
    step(net, loop, 4);
  });
  run_ranks(2, [&](World& world) {
    Net net;
    ShardedDataParallel zero(net, groups_of(world, 1));
    net.scale.set_data(at::ones({1}));
    EXPECT_THAT(refusal([&] { backward(net, whole_batch(samples)); }), HasSubstr("sharded data parallelism: 'scale' was given values of shape [1]"));
  });
}

/// Clipping, for one, asks for what is updated.
TEST(ZeroPlainLoop, AnAliasThatIsKeptKeepsItsValues) {
  run_ranks(2, [&](World& world) {
    Net net;
    ShardedDataParallel zero(net, groups_of(world, 1));
    const std::vector<at::Tensor> trained = weights_of(net);
    std::vector<at::Tensor> kept;
    for (const at::Tensor& parameter : net.parameters()) {
      kept.push_back(parameter.data());
      parameter.set_data(at::zeros_like(parameter));
    }
    (void)zero.updated();
    for (size_t i = 0; i < kept.size(); ++i) net.parameters()[i].set_data(kept[i]);
    (void)zero.updated();
    EXPECT_TRUE(same_bits(weights_of(net), trained));
    for (const auto& part : zero.updated()) EXPECT_TRUE(part.tensor.numel() == 0 || part.tensor.detach().abs().max().item<double>() > 0) << part.name;
  });
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

/// The order of calls of PyTorch's DCGAN example.
template <class D, class G>
void gan_step(Net& d, Net& g, D& optimizer_d, G& optimizer_g, const Batch& real, const at::Tensor& noise) {
  const auto judge = [&](const at::Tensor& x) { return d.forward(x).square().sum() / static_cast<double>(samples); };
  d.zero_grad();
  judge(real.x).backward();
  const at::Tensor fake = at::constant_pad_nd(g.forward(noise), {0, 2});
  judge(fake.detach()).neg().backward();
  optimizer_d.step();
  g.zero_grad();
  judge(fake).backward();
  optimizer_g.step();
}

TEST(ZeroPlainLoop, TheGanLoopWithTwoWrappers) {
  const auto noise_of = [](int step) { return whole_batch(samples, 100 + step); };
  Net reference_d, reference_g;
  torch::optim::Adam reference_optimizer_d(reference_d.parameters(), torch::optim::AdamOptions(0.02));
  torch::optim::Adam reference_optimizer_g(reference_g.parameters(), torch::optim::AdamOptions(0.02));
  for (int step = 0; step < 3; ++step) {
    gan_step(reference_d, reference_g, reference_optimizer_d, reference_optimizer_g, whole_batch(samples, step), noise_of(step).x);
  }
  for (const int ranks : {1, 2, 3}) {
    for (const Way& way : ways) {
      run_ranks(ranks, [&](World& world) {
        Net d, g;
        auto zero_d = std::make_unique<ShardedDataParallel>(d, groups_of(world, 1), options_of(way));
        auto zero_g = std::make_unique<ShardedDataParallel>(g, groups_of(world, 1), options_of(way));
        const auto make = [](const std::vector<at::Tensor>& parts) { return std::make_unique<torch::optim::Adam>(parts, torch::optim::AdamOptions(0.02)); };
        auto optimizer_d = zero_optimizer(d, make), optimizer_g = zero_optimizer(g, make);
        for (int step = 0; step < 3; ++step) {
          gan_step(d, g, optimizer_d, optimizer_g, part_of(whole_batch(samples, step), ranks, world.rank()), part_of(noise_of(step), ranks, world.rank()).x);
        }
        EXPECT_LT(largest_difference(weights_of(d), weights_of(reference_d)), 100 * parity);
        EXPECT_LT(largest_difference(weights_of(g), weights_of(reference_g)), 100 * parity);
        zero_d.reset();
        zero_g.reset();
      });
    }
  }
}

/// One clears in every step, and the other in every second, whose gradients add up meanwhile.
template <class First, class Second, class Backward>
void two_rates(First& first, Second& second, const Backward& backward) {
  for (int step = 0; step < 4; ++step) {
    first.zero_grad();
    if (step % 2 == 0) second.zero_grad();
    backward(step);
    first.step();
    if (step % 2 == 1) second.step();
  }
}

TEST(ZeroPlainLoop, EachOfTwoOptimizersOfOneWrapperClearsItsOwn) {
  const auto is_last = [](const nn::NamedParameter& parameter) { return parameter.name.starts_with("last"); };
  const auto sgd_of = [is_last](bool last) {
    return [is_last, last](const std::vector<nn::NamedParameter>& parameters) {
      std::vector<at::Tensor> mine;
      for (const auto& parameter : parameters) {
        if (is_last(parameter) == last) mine.push_back(parameter.tensor);
      }
      return std::make_unique<torch::optim::SGD>(mine, 0.1);
    };
  };
  Net reference;
  nn::assign_paths(reference);
  const auto first = sgd_of(false)(nn::unique_parameters(reference)), second = sgd_of(true)(nn::unique_parameters(reference));
  two_rates(*first, *second, [&](int step) { backward(reference, whole_batch(samples, step)); });
  for (const Way& way : ways) {
    run_ranks(2, [&](World& world) {
      Net net;
      const ShardedDataParallel zero(net, groups_of(world, 1), options_of(way));
      auto mine = zero_optimizer(net, sgd_of(false)), others = zero_optimizer(net, sgd_of(true));
      two_rates(mine, others, [&](int step) { backward(net, part_of(whole_batch(samples, step), 2, world.rank())); });
      EXPECT_LT(largest_difference(weights_of(net), weights_of(reference)), 100 * parity);
    });
  }
}

/// Ranks that use different parameters finish their buckets in different orders, and both wrappers' collectives are one sequence.
TEST(ZeroPlainLoop, TwoWrappersOfOneEngineStartTheirBucketsInOneOrder) {
  const auto loss = [](Net& d, Net& g, bool whole) {
    const at::Tensor x = at::constant_pad_nd(g.forward(whole_batch(samples, 3).x), {0, 2});
    const at::Tensor hidden = at::tanh(d.middle(at::tanh(d.first(x))) * d.scale);
    return (whole ? d.last(hidden) : at::linear(hidden, d.last->weight)).square().sum() / static_cast<double>(samples);
  };
  Net d, g;
  for (int rank = 0; rank < 2; ++rank) loss(d, g, rank == 0).backward();
  for (const Way& way : ways) {
    SliceCollector gradients_d, gradients_g;
    run_ranks(2, [&](World& world) {
      Net my_d, my_g;
      ZeroOptions options = options_of(way);
      options.sizes = {};
      options.find_unused_parameters = true;
      ShardedDataParallel zero_d(my_d, groups_of(world, 1), options), zero_g(my_g, groups_of(world, 1), options);
      loss(my_d, my_g, world.rank() == 0).backward();
      gradients_d.add_gradients(zero_d.shards());
      gradients_g.add_gradients(zero_g.shards());
    });
    EXPECT_LT(largest_difference(in_order_of(Net(), gradients_d.whole()), gradients_of(d)), parity);
    EXPECT_LT(largest_difference(in_order_of(Net(), gradients_g.whole()), gradients_of(g)), parity);
  }
}

/// While an exception unwinds, a wrapper waits for nobody.
TEST(ZeroPlainLoop, AWrapperThatGoesInTheMiddleOfAStepWaitsForNobody) {
  constexpr std::chrono::seconds timeout(60);  // what it would wait
  std::latch gone(1);
  run_ranks(2,
            [&](World& world) {
              Net net;
              auto zero = std::make_unique<ShardedDataParallel>(net, groups_of(world, 1),
                                                                ZeroOptions{.stage = 1, .sizes = small_buckets, .replicas = ReplicaStart::Trust});
              if (world.rank() == 1) return gone.wait();
              at::Tensor hidden = net.first(whole_batch(samples).x);
              hidden.register_hook([](const at::Tensor&) -> at::Tensor { throw std::runtime_error("in backward"); });
              const auto start = std::chrono::steady_clock::now();
              EXPECT_THROW(net.last(at::tanh(net.middle(at::tanh(hidden)) * net.scale)).sum().backward(), std::runtime_error);
              zero.reset();
              EXPECT_LT(std::chrono::steady_clock::now() - start, timeout / 2);
              gone.count_down();
            },
            {.timeout = timeout});
}

void set_trained(Net& net, bool first, bool last) {
  for (const at::Tensor& parameter : net.first->parameters()) at::Tensor(parameter).requires_grad_(first);
  for (const at::Tensor& parameter : net.last->parameters()) at::Tensor(parameter).requires_grad_(last);
}

TEST(ZeroPlainLoop, FreezingAndUnfreezingAtAnyTime) {
  for (const auto& make : {make_sgd, make_adam}) {
    expect_parity(
        [](Net& net, const Loop& loop) {
          const std::vector<std::pair<bool, bool>> stages{{false, true}, {true, true}, {true, false}, {false, true}, {true, true}};
          for (size_t stage = 0; stage < stages.size(); ++stage) {
            set_trained(net, stages[stage].first, stages[stage].second);
            for (int step = 0; step < 2; ++step) {
              loop.zero_grad();
              backward(net, loop.mine(static_cast<int64_t>(2 * stage) + step));
              loop.step();
            }
          }
        },
        make, [](Net& net) { set_trained(net, false, true); });
  }
}

/// A fine-tuning program makes a new optimizer, over what is trained now, when it has unfrozen or frozen layers: no step lies between.
TEST(ZeroPlainLoop, AnOptimizerOverWhatWasJustUnfrozenTrainsIt) {
  const auto make = [](const std::vector<at::Tensor>& parameters) {
    std::vector<at::Tensor> trained;
    for (const at::Tensor& parameter : parameters) {
      if (parameter.requires_grad()) trained.push_back(parameter);
    }
    return make_sgd(trained);
  };
  const std::vector<std::pair<bool, bool>> stages{{false, true}, {true, true}, {true, false}};
  const auto train = [&](Net& net, const auto& optimizer_of, const std::function<Batch(int64_t)>& mine) {
    for (size_t stage = 0; stage < stages.size(); ++stage) {
      set_trained(net, stages[stage].first, stages[stage].second);
      auto optimizer = optimizer_of(net);
      for (int step = 0; step < 2; ++step) {
        optimizer->zero_grad();
        backward(net, mine(static_cast<int64_t>(2 * stage) + step));
        optimizer->step();
      }
    }
  };
  Net reference;
  train(reference, [&](Net& net) { return make(net.parameters()); }, [](int64_t step) { return whole_batch(samples, step); });
  for (const auto& [ranks, replicas] : {Layout{2, 1}, Layout{3, 1}, Layout{4, 2}}) {
    for (const Way& way : ways) {
      run_ranks(ranks, [&, ranks = ranks, replicas = replicas](World& world) {
        Net net;
        set_trained(net, stages[0].first, stages[0].second);
        ShardedDataParallel zero(net, groups_of(world, replicas), options_of(way));
        struct Optimizer {
          decltype(zero_optimizer(zero, make)) of;
          void zero_grad() { of.zero_grad(); }
          void step() { of.step(); }
        };
        train(
            net, [&](Net&) { return std::make_unique<Optimizer>(zero_optimizer(zero, make)); },
            [&](int64_t step) { return part_of(whole_batch(samples, step), ranks, world.rank()); });
        EXPECT_LT(largest_difference(weights_of(net), weights_of(reference)), 10 * parity) << ranks << " ranks, stage " << way.stage;
      });
    }
  }
}

/// As on one process, where it goes on moving the parameter.
TEST(ZeroPlainLoop, AGradientThatNobodyClearedOutlivesFreezing) {
  expect_parity([](Net& net, const Loop& loop) {
    backward(net, loop.mine(0));
    loop.step();
    net.first->weight.requires_grad_(false);  // its bias, in the same bucket, goes on
    for (int step = 1; step < 3; ++step) {
      for (at::Tensor parameter : net.parameters()) {
        if (parameter.requires_grad()) parameter.mutable_grad().reset();
      }
      backward(net, loop.mine(step));
      loop.step();
    }
  });
}

TEST(ZeroPlainLoop, WhatIsFrozenFromTheStartIsNeitherReducedNorGathered) {
  run_ranks(2, [&](World& world) {
    const auto recorder = std::make_shared<comm::Recorder>();
    const comm::GroupInfo info{.name = "world", .rank = world.rank(), .size = 2, .ranks = {}};
    const comm::Group group(info, comm::make_record_engine(recorder, info, world.group().engine()));
    Net net;
    for (const at::Tensor& parameter : net.middle->parameters()) at::Tensor(parameter).requires_grad_(false);
    ShardedDataParallel zero(net, {.shard = group}, {.stage = 2, .sizes = small_buckets, .buffers = BufferBroadcast::Never});
    int64_t trained = 0;
    for (const auto& bucket : zero.layout().buckets) {
      bool frozen = false;
      for (const auto& slot : bucket.slots) frozen |= zero.shards()[slot.parameter].name.starts_with("middle");
      if (!frozen) trained += zero.layout().numel(bucket) * 4;
    }
    auto optimizer = zero_optimizer(zero, make_sgd);
    backward(net, whole_batch(samples));
    recorder->clear();
    optimizer.zero_grad();
    backward(net, whole_batch(samples));
    optimizer.step();
    int64_t bytes = 0;
    for (const auto& record : recorder->records()) {
      if (record.site == "zero.bucket" || record.site == "zero.parameters") bytes += record.sent_bytes;
    }
    EXPECT_EQ(bytes, trained / 2 * 2);
  });
}

TEST(ZeroPlainLoop, AnOptimizerOrClippingOverTheParametersIsToldWhatToWrite) {
  for (const Way& way : ways) {
    run_ranks(2, [&](World& world) {
      Net net;
      {
        ShardedDataParallel zero(net, groups_of(world, 1), options_of(way));
        torch::optim::Adam wrong(net.parameters());
        for (const bool set_to_none : {true, false}) {
          wrong.zero_grad(set_to_none);
          backward(net, whole_batch(samples));
          const auto expect_told = [](const std::string& text) {
            EXPECT_THAT(text, HasSubstr("sharded data parallelism: the gradient of 'scale' lies in parts"));
            EXPECT_THAT(text, HasSubstr("zero_optimizer(sharded, make)"));
            EXPECT_THAT(text, HasSubstr("torch::optim::LBFGS, which needs whole gradients, works under DistributedDataParallel alone"));
            EXPECT_THAT(text, HasSubstr("by hand on sharded.updated()"));
          };
          expect_told(refusal([&] { wrong.step(); }));
          expect_told(refusal([&] { torch::nn::utils::clip_grad_norm_(net.parameters(), 1.0); }));
          expect_told(refusal([&] { net.scale.mutable_grad().mul_(0.5); }));
        }
      }
      backward(net, whole_batch(samples));  // the module is as before
      EXPECT_LT(largest_difference(gradients_of(net), one_process(1)[0]), parity);
    });
  }
}

TEST(ZeroPlainLoop, PartsThatWereNotBroughtTogetherAreNoticed) {
  run_ranks(2, [&](World& world) {
    Net net;
    ShardedDataParallel zero(net, groups_of(world, 1), {.stage = 2});
    std::vector<at::Tensor> parts;
    for (const auto& shard : zero.shards()) parts.push_back(shard.tensor);
    torch::optim::SGD optimizer(parts, 0.05);  // goes by Tensor::data, behind the version's back
    backward(net, whole_batch(samples));
    optimizer.step();
    EXPECT_THAT(refusal([&] { backward(net, whole_batch(samples)); }), HasSubstr("make the optimizer by zero_optimizer, which does"));
    zero.after_update();
    net.zero_grad();
    backward(net, whole_batch(samples));
    {
      const at::NoGradGuard no_grad;
      for (at::Tensor parameter : net.parameters()) parameter.clamp_(-0.1, 0.1);  // of whole parameters, on every rank
    }
    backward(net, whole_batch(samples));
    {
      const at::NoGradGuard no_grad;
      net.last->weight.zero_();  // lies in one rank's part alone
      net.last->bias.zero_();
    }
    backward(net, whole_batch(samples));
    for (const at::Tensor& parameter : net.parameters())
      parameter.data().mul_(0.5);  // behind the version's back, and of every rank's part: nobody forgot a gather
    backward(net, whole_batch(samples));
  });
}

TEST(ZeroPlainLoop, SchedulersOfLibtorch) {
  run_ranks(2, [&](World& world) {
    Net net;
    ShardedDataParallel zero(net, groups_of(world, 1), {.stage = 2});
    auto optimizer = zero_optimizer(zero, [](const std::vector<at::Tensor>& parts) { return std::make_unique<torch::optim::SGD>(parts, 0.5); });
    torch::optim::StepLR schedule(*optimizer, 1, 0.1);
    const at::Tensor before = net.scale.detach().clone();
    for (int step = 0; step < 2; ++step) {
      optimizer.zero_grad();
      backward(net, whole_batch(samples, step));
      optimizer.step();
      schedule.step();
    }
    EXPECT_LT(optimizer->param_groups().front().options().get_lr(), 0.5);
    EXPECT_FALSE(at::equal(net.scale, before));
  });
}

/// Its dot products are over all parameters, of which a rank has a part: refused where it is made, before ranks wait for each other. A rank alone has them
/// whole.
TEST(ZeroPlainLoop, AnOptimizerOfWholeVectorsIsRefusedByName) {
  const auto make = [](const std::vector<at::Tensor>& parts) {
    return std::make_unique<torch::optim::LBFGS>(parts, torch::optim::LBFGSOptions(0.5).max_iter(3).line_search_fn("strong_wolfe"));
  };
  const auto train = [](Net& net, auto& optimizer) {
    for (int step = 0; step < 2; ++step) {
      optimizer.step([&] {
        optimizer.zero_grad();
        const Batch batch = whole_batch(samples, step);
        const at::Tensor loss = loss_of(net.forward(batch.x), batch.y, samples);
        loss.backward();
        return loss;
      });
    }
  };
  Net reference;
  const auto alone = make(reference.parameters());
  train(reference, *alone);
  for (const Way& way : ways) {
    run_ranks(2, [&](World& world) {
      Net net;
      ShardedDataParallel zero(net, groups_of(world, 1), options_of(way));
      for (const std::string& text : {refusal([&] { (void)zero_optimizer(zero, make); }), refusal([&] { (void)zero_optimizer(net, make); })}) {
        EXPECT_THAT(text, HasSubstr("zero_optimizer: torch::optim::LBFGS takes dot products over all parameters"));
        EXPECT_THAT(text, HasSubstr("one of 2 parts"));
        EXPECT_THAT(text, HasSubstr("use an optimizer that goes element by element (Adam, AdamW, SGD, Adagrad, RMSprop), or DistributedDataParallel"));
      }
      (void)zero_optimizer(zero, make_adam);
    });
    run_ranks(1, [&](World& world) {
      Net net;
      ShardedDataParallel zero(net, groups_of(world, 1), options_of(way));
      auto optimizer = zero_optimizer(zero, make);
      train(net, optimizer);
      EXPECT_LT(largest_difference(weights_of(net), weights_of(reference)), parity) << "stage " << way.stage;
    });
  }
}

/// A program's own class, of which nobody knows what its step takes of a tensor.
class OwnDescent : public Torch {
 public:
  explicit OwnDescent(const std::vector<at::Tensor>& parts) : Torch(parts, std::make_unique<torch::optim::SGDOptions>(0.05)) {}
  at::Tensor step(LossClosure /*closure*/ = nullptr) override {
    const at::NoGradGuard no_grad;
    for (const auto& group : param_groups()) {
      for (at::Tensor part : group.params()) {
        if (part.grad().defined()) part.sub_(part.grad(), 0.05);
      }
    }
    return {};
  }
};

/// Nor of what is derived from a class that goes by elements.
class OwnSgd : public torch::optim::SGD {
 public:
  explicit OwnSgd(const std::vector<at::Tensor>& parts) : SGD(parts, torch::optim::SGDOptions(0.05)) {}
};

/// Layer-wise rates (LAMB, LARS) are norms of whole tensors, of which a rank has parts; parts are brought together, so replicas would agree on what is wrong.
TEST(ZeroPlainLoop, AnOptimizerOfAnUnknownClassIsRefusedUnlessTheProgramVouches) {
  const auto own = [](const std::vector<at::Tensor>& parts) { return std::make_unique<OwnDescent>(parts); };
  const auto train = [](Net& net, auto& optimizer, int ranks, int rank) {
    for (int step = 0; step < 2; ++step) {
      optimizer.zero_grad();
      backward(net, part_of(whole_batch(samples, step), ranks, rank));
      optimizer.step();
    }
  };
  Net reference;
  torch::optim::SGD alone(reference.parameters(), torch::optim::SGDOptions(0.05));
  train(reference, alone, 1, 0);
  for (const Way& way : ways) {
    run_ranks(2, [&](World& world) {
      Net net;
      ShardedDataParallel zero(net, groups_of(world, 1), options_of(way));
      for (const std::string& text : {refusal([&] { (void)zero_optimizer(zero, own); }), refusal([&] { (void)zero_optimizer(net, own); })}) {
        EXPECT_THAT(text, HasSubstr("OwnDescent' is no class of which it is known that it goes element by element"));
        EXPECT_THAT(text, HasSubstr("one of 2 parts"));
        EXPECT_THAT(text, HasSubstr("ByElements::Vouched"));
      }
      EXPECT_THAT(refusal([&] { (void)zero_optimizer(zero, [](const std::vector<at::Tensor>& parts) { return std::make_unique<OwnSgd>(parts); }); }),
                  HasSubstr("OwnSgd' is no class"));
      auto optimizer = zero_optimizer(zero, own, ByElements::Vouched);
      train(net, optimizer, 2, world.rank());
      EXPECT_LT(largest_difference(weights_of(net), weights_of(reference)), 10 * parity) << "stage " << way.stage;
    });
  }
  run_ranks(1, [&](World& world) {  // has all of each parameter
    Net net;
    ShardedDataParallel zero(net, groups_of(world, 1));
    EXPECT_NO_THROW((void)zero_optimizer(zero, own));
  });
}

TEST(ZeroPlainLoop, BuffersAreRankZerosWhenAStepIsComplete) {
  struct Normed : torch::nn::Module {
    Normed() {
      norm = register_module("norm", torch::nn::BatchNorm1d(5));
      net = register_module("net", std::make_shared<Net>());
    }
    torch::nn::BatchNorm1d norm{nullptr};
    std::shared_ptr<Net> net;
  };
  std::vector<at::Tensor> means(4);
  run_ranks(4, [&](World& world) {
    Normed model;
    ShardedDataParallel zero(model, groups_of(world, 2), {.stage = 2});
    for (int step = 0; step < 2; ++step) {
      const Batch mine = part_of(whole_batch(samples, step), 4, world.rank());
      loss_of(model.net->forward(model.norm(mine.x)), mine.y, samples).backward();
    }
    means[world.rank()] = model.norm->running_mean.clone();
  });
  EXPECT_GT(means[0].abs().max().item<double>(), 0);
  for (const at::Tensor& mean : means) EXPECT_TRUE(at::equal(mean, means[0]));
}

/// A table that ranks made differently is rank 0's before the first forward pass, as are the products with it; one that a graph holds is not changed under it.
TEST(ZeroPlainLoop, BuffersThatAGraphHoldsDoNotChangeUnderIt) {
  struct Scaled : torch::nn::Module {
    explicit Scaled(double scale) {
      net = register_module("net", std::make_shared<Net>());
      table = register_buffer("table", at::full({5}, scale));
    }
    at::Tensor loss(const at::Tensor& x) { return net->forward(x * table).square().sum(); }
    std::shared_ptr<Net> net;
    at::Tensor table;
  };
  run_ranks(2, [&](World& world) {
    Scaled model(1 + world.rank()), reference(1);
    ShardedDataParallel zero(model, groups_of(world, 1), {.stage = 1});
    EXPECT_EQ(model.table[0].item<double>(), 1);
    const at::Tensor x = whole_batch(samples).x.clone().requires_grad_();
    model.loss(x).backward();
    const at::Tensor expected = torch::autograd::grad({reference.loss(x)}, {x})[0];
    EXPECT_TRUE(at::equal(x.grad(), expected));
    const int64_t before = model.table._version();
    {
      const at::NoGradGuard no_grad;
      model.table.data().fill_(3 + world.rank());
    }
    model.loss(x).backward();
    EXPECT_EQ(model.table[0].item<double>(), 3);
    EXPECT_EQ(model.table._version(), before + world.rank());
  });
}

TEST(ZeroPlainLoop, ABufferOfAnotherSizeOnOneRankIsRefusedOnAll) {
  for (const int replicas : {1, 2}) {
    for (const bool find_unused : {false, true}) {
      run_ranks(4, [&](World& world) {
        Net net;
        net.register_buffer("mask", at::ones({2}));
        ShardedDataParallel zero(net, groups_of(world, replicas), {.stage = 2, .find_unused_parameters = find_unused});
        const auto step = [&] { backward(net, part_of(whole_batch(samples), 4, world.rank())); };
        EXPECT_NO_THROW(step());
        if (world.rank() == 3) net.named_buffers()["mask"].set_data(at::ones({5}));
        const std::string said = refusal(step);
        EXPECT_THAT(said, HasSubstr("data parallelism: buffers of the module "));
        if (world.rank() == 3) EXPECT_THAT(said, HasSubstr("'mask', here [5], Float"));
      });
    }
  }
}

/// A loop that goes on after the refusal has mended nothing.
TEST(ZeroPlainLoop, WeightsThatOneRankLoadsBehindTheWrappingAreRefusedInEachStep) {
  run_ranks(2, [&](World& world) {
    Net net;
    ShardedDataParallel zero(net, groups_of(world, 1), {.stage = 1});
    if (world.rank() == 0) fill_parameters(net, 2);
    for (int i = 0; i < 2; ++i) EXPECT_THAT(refusal([&] { backward(net, whole_batch(samples)); }), HasSubstr("the replicas differ: parameter '"));
  });
}

TEST(ZeroPlainLoop, RanksThatTrainOtherParametersAreRefused) {
  for (const int replicas : {1, 2}) {
    run_ranks(4, [&](World& world) {
      Net net;
      ShardedDataParallel zero(net, groups_of(world, replicas), {.stage = 2});
      backward(net, whole_batch(samples));
      net.zero_grad();
      net.scale.requires_grad_(world.rank() != 2);
      EXPECT_THAT(refusal([&] { backward(net, whole_batch(samples)); }), HasSubstr(" of world trains other parameters than the first of its group"));
    });
  }
}

TEST(ZeroPlainLoop, WhatIsRegisteredAfterWrappingIsRefusedByName) {
  run_ranks(2, [&](World& world) {
    Net net;
    const ShardedDataParallel zero(net, groups_of(world, 1), {.stage = 2});
    const at::Tensor late = net.register_parameter("gain", at::ones({3}));
    EXPECT_THAT(refusal([&] { (net.forward(whole_batch(samples).x) * late).sum().backward(); }), HasSubstr("sharded data parallelism: 'gain' of module "));
  });
}

std::string saved_state(Torch& optimizer) {
  std::stringstream file;
  torch::save(optimizer, file);
  return file.str();
}

void load_state(Torch& optimizer, const std::string& bytes) {
  std::stringstream file(bytes);
  torch::load(optimizer, file);
}

/// One weight, which two ranks cut into halves of the same size.
struct Halved {
  explicit Halved(const ShardGroups& groups, int stage = 1, MakeOptimizer make = make_adam)
      : net(torch::nn::LinearOptions(8, 8).bias(false)), zero((fill_parameters(*net), *net), groups, {.stage = stage}), optimizer(zero_optimizer(zero, make)) {}
  void backward(int step, bool alike = false) {
    optimizer.zero_grad();
    const at::Tensor y = net(at::arange(16, at::kFloat).view({2, 8}).cos() + step);
    (alike ? y.sum() : y.square().sum()).backward();
  }
  torch::nn::Linear net;
  ShardedDataParallel zero;
  ZeroOptimizer<Torch> optimizer;
};

TEST(ZeroPlainLoop, OneRanksOptimizerFileIsNotEverybodysState) {
  for (const int stage : {1, 2}) {
    std::vector<std::string> files(2);
    std::vector<at::Tensor> weights(2), expected(2);
    run_ranks(2, [&](World& world) {
      Halved model(groups_of(world, 1), stage);
      for (int step = 0; step < 3; ++step) {
        if (step == 2) files[world.rank()] = saved_state(*model.optimizer);
        if (step == 2) weights[world.rank()] = model.net->weight.detach().clone();
        model.backward(step);
        model.optimizer.step();
      }
      expected[world.rank()] = model.net->weight.detach().clone();
    });
    const auto go_on = [&](World& world, const std::string& file, const std::function<void(Halved&)>& then) {
      Halved model(groups_of(world, 1), stage);
      {
        const at::NoGradGuard no_grad;
        model.net->weight.copy_(weights[0]);
      }
      load_state(*model.optimizer, file);
      model.backward(2);
      then(model);
    };
    run_ranks(2, [&](World& world) {
      go_on(world, files[0], [&](Halved& model) {
        const auto step = [&] { model.optimizer.step(); };
        EXPECT_THAT(refusal(step), AllOf(HasSubstr("the optimizer's state is the same on all 2 ranks of "), HasSubstr("checkpoint::load")));
        EXPECT_THAT(refusal(step), HasSubstr("is the same on all 2 ranks")) << "nor at the next try";
        EXPECT_TRUE(at::equal(model.net->weight, weights[0]));
      });
      go_on(world, files[world.rank()], [&](Halved& model) {
        model.optimizer.step();
        EXPECT_TRUE(at::equal(model.net->weight, expected[0]));
      });
    });
  }
}

/// Rows of one gradient have one state; an Adagrad that begins with a constant has learned nothing yet.
TEST(ZeroPlainLoop, StateThatIsAlikeOnAllRanksByItselfIsTaken) {
  std::string file;
  run_ranks(2, [&](World& world) {
    Halved model(groups_of(world, 1));
    model.backward(0, /*alike=*/true);
    model.optimizer.step();
    if (world.rank() == 0) file = saved_state(*model.optimizer);
  });
  run_ranks(2, [&](World& world) {
    Halved model(groups_of(world, 1));
    load_state(*model.optimizer, file);
    model.backward(1, /*alike=*/true);
    model.optimizer.step();
    Halved adagrad(groups_of(world, 1), 1, [](const std::vector<at::Tensor>& parts) {
      return std::make_unique<torch::optim::Adagrad>(parts, torch::optim::AdagradOptions(0.1).initial_accumulator_value(0.5));
    });
    adagrad.backward(0);
    adagrad.optimizer.step();
  });
}

TEST(ZeroPlainLoop, StateOfOtherSizesIsRefusedByNameOnAllRanks) {
  for (const auto& make : {MakeOptimizer(make_adam), MakeOptimizer(make_sgd)}) {
    torch::nn::Linear whole(5, 3);
    const auto optimizer = make(whole->parameters());
    whole(at::ones({1, 5})).sum().backward();
    optimizer->step();
    const std::string of_whole = saved_state(*optimizer);
    std::vector<std::string> files(2);
    const auto each = [&](const std::function<void(World&, ZeroOptimizer<Torch>&)>& body) {
      run_ranks(2, [&](World& world) {
        torch::nn::Linear net(5, 3);
        fill_parameters(*net);
        ShardedDataParallel zero(*net, groups_of(world, 1));
        auto sharded = zero_optimizer(zero, make);
        net(at::ones({1, 5})).square().sum().backward();
        body(world, sharded);
      });
    };
    each([&](World& world, ZeroOptimizer<Torch>& sharded) {
      sharded.step();
      files[world.rank()] = saved_state(*sharded);
      load_state(*sharded, of_whole);
      EXPECT_THAT(refusal([&] { sharded.step(); }), HasSubstr("and is of whole parameters; make the optimizer behind the wrapper")) << "in a later step, too";
    });
    each([&](World&, ZeroOptimizer<Torch>& sharded) {
      load_state(*sharded, of_whole);
      EXPECT_THAT(refusal([&] { sharded.step(); }),
                  AllOf(HasSubstr("the optimizer's state of '"), HasSubstr("is of whole parameters"), HasSubstr("checkpoint::load")));
    });
    each([&](World& world, ZeroOptimizer<Torch>& sharded) {
      load_state(*sharded, files[0]);
      const auto says = world.rank() == 0 ? HasSubstr("on rank 1 the optimizer's state has other sizes") : HasSubstr("the state of another rank's part");
      EXPECT_THAT(refusal([&] { sharded.step(); }), says);
    });
  }
}

TEST(ZeroPlainLoop, AnOptimizerWhoseWrapperIsGoneIsRefusedByName) {
  run_ranks(2, [](World& world) {
    for (const int stage : {1, 2}) {
      Net net;
      auto zero = std::make_unique<ShardedDataParallel>(net, ShardGroups{.shard = world.group()}, ZeroOptions{.stage = stage});
      auto optimizer = zero_optimizer(*zero, make_adam);
      backward(net, whole_batch(samples));
      zero.reset();
      const auto is_gone = AllOf(HasSubstr("the wrapper that holds '"), HasSubstr("is gone"), HasSubstr("keep the wrapper"));
      EXPECT_THAT(refusal([&] { optimizer.step(); }), is_gone);
      EXPECT_THAT(refusal([&] { optimizer.zero_grad(); }), is_gone);
      EXPECT_THAT(refusal([&] { optimizer->zero_grad(); }), is_gone);
      EXPECT_EQ(optimizer.inner().param_groups().size(), 1u) << "a scheduler may go after it";
      const ShardedDataParallel anew(net, ShardGroups{.shard = world.group()}, ZeroOptions{.stage = stage});  // perhaps where the first one lay
      EXPECT_THAT(refusal([&] { optimizer.step(); }), is_gone);
    }
  });
}

/// The last wrapper of a model takes its gradients: an optimizer over the parts of the one before would update nothing, and say nothing.
TEST(ZeroPlainLoop, AnOptimizerOverAWrapperThatAnotherFollowedIsRefusedByName) {
  for (const int ranks : {2, 3}) {
    run_ranks(ranks, [](World& world) {
      for (const int stage : {1, 2}) {
        Net net;
        ShardedDataParallel first(net, {.shard = world.group()}, {.stage = stage});
        auto before = zero_optimizer(first, make_sgd);
        ShardedDataParallel last(net, {.shard = world.group()}, {.stage = stage});
        auto behind = zero_optimizer(first, make_sgd), right = zero_optimizer(last, make_sgd);
        const auto weights = weights_of(net);
        backward(net, whole_batch(samples));
        for (auto* const wrong : {&before, &behind}) {
          EXPECT_THAT(refusal([&] { wrong->step(); }), AllOf(HasSubstr("was wrapped again"), HasSubstr("'scale'"), HasSubstr("zero_optimizer(wrapper")));
        }
        right.step();
        EXPECT_FALSE(same_bits(weights, weights_of(net)));
      }
    });
  }
}

/// The step of what is inside would leave the parts apart, and an evaluation behind it would differ between ranks.
TEST(ZeroPlainLoop, AStepByTheArrowIsRefusedByNameBeforeItUpdates) {
  run_ranks(2, [](World& world) {
    for (const auto& make : {MakeOptimizer(make_sgd), MakeOptimizer(make_adam)}) {
      Net net;
      ShardedDataParallel zero(net, {.shard = world.group()}, {.stage = 2});
      auto optimizer = zero_optimizer(zero, make);
      const auto weights = weights_of(net);
      backward(net, whole_batch(samples));
      EXPECT_THAT(refusal([&] { optimizer->step(); }), AllOf(HasSubstr("optimizer->step()"), HasSubstr("write optimizer.step()")));
      EXPECT_TRUE(same_bits(weights, weights_of(net)));
      const at::Tensor gradient = zero.updated().front().tensor.grad();
      EXPECT_TRUE(!gradient.defined() || !nn::is_gradient_guard(gradient)) << "the gradients are there again";
      const auto step_with = [&](size_t, size_t) { optimizer.step(); };
      step_with(optimizer->param_groups().size(), optimizer->state().size());  // what was asked for by the arrow lives on to the end of the line
      EXPECT_FALSE(same_bits(weights, weights_of(net)));
      backward(net, whole_batch(samples));
      optimizer->zero_grad(/*set_to_none=*/false);
      for (const auto& updated : zero.updated()) EXPECT_TRUE(at::equal(updated.tensor.grad(), at::zeros_like(updated.tensor))) << updated.name;
      optimizer->zero_grad();
      for (const auto& updated : zero.updated()) EXPECT_FALSE(updated.tensor.grad().defined()) << updated.name;
    }
  });
}

TEST(ZeroPlainLoop, TheInnerStepIsNamedWhereItsPartsWereLeftApart) {
  run_ranks(2, [](World& world) {
    Net net;
    ShardedDataParallel zero(net, {.shard = world.group()}, {.stage = 2});
    auto optimizer = zero_optimizer(zero, make_adam);
    backward(net, whole_batch(samples));
    optimizer.inner().step();
    EXPECT_THAT(refusal([&] { backward(net, whole_batch(samples)); }), AllOf(HasSubstr("after_update()"), HasSubstr("optimizer.inner().step()")));
    zero.after_update();
    backward(net, whole_batch(samples));
  });
}

std::vector<at::Tensor> local_gradients(Net& net, const Batch& mine) {
  return torch::autograd::grad({loss_of(net.forward(mine.x), mine.y, samples)}, net.parameters());
}

/// As on one process. What the update leaves alone is another matter: a graph over that goes on.
TEST(ZeroPlainLoop, AGraphFromBeforeAnUpdateIsRefused) {
  for (const int ranks : {2, 3}) {
    for (const int stage : {1, 2}) {
      run_ranks(ranks, [&](World& world) {
        Net net;
        for (at::Tensor parameter : net.last->parameters()) parameter.set_requires_grad(false);
        ShardedDataParallel zero(net, {.shard = world.group()}, {.stage = stage, .sizes = small_buckets});
        auto optimizer = zero_optimizer(zero, make_adam);
        const Batch mine = part_of(whole_batch(samples), ranks, world.rank());
        const at::Tensor loss = loss_of(net.forward(mine.x), mine.y, samples);
        const at::Tensor hidden = mine.x.new_ones({2, 7}).requires_grad_(), over_frozen = net.last(hidden).square().sum();
        backward(net, mine);
        optimizer.step();
        EXPECT_THAT([&] { loss.backward(); }, ::testing::ThrowsMessage<std::exception>(HasSubstr("modified by an inplace operation")));
        EXPECT_NO_THROW((void)torch::autograd::grad({over_frozen}, {hidden}));
        {  // libtorch's SGD hides its writes from one process, too
          Net other;
          ShardedDataParallel hidden_from(other, {.shard = world.group()}, {.stage = stage, .sizes = small_buckets});
          auto sgd = zero_optimizer(hidden_from, [](std::vector<at::Tensor> parts) { return std::make_unique<torch::optim::SGD>(std::move(parts), 0.1); });
          const at::Tensor before = loss_of(other.forward(mine.x), mine.y, samples);
          backward(other, mine);
          sgd.step();
          EXPECT_NO_THROW(before.backward());
        }
        optimizer.zero_grad();
        backward(net, mine);
        const at::Tensor unchanged = loss_of(net.forward(mine.x), mine.y, samples);
        optimizer.zero_grad();
        optimizer.step();  // with nothing
        EXPECT_NO_THROW(unchanged.backward());
      });
    }
  }
}

/// One wrapper, an optimizer for each of two networks: the generator's graph is older than the discriminator's update, and saved nothing that it wrote.
TEST(ZeroPlainLoop, AnUpdateCountsForWhatItsOptimizerHolds) {
  struct Pair : torch::nn::Module {
    Pair() {
      register_module("g1", g1);
      register_module("g2", g2);
      register_module("d1", discriminator);
      fill_parameters(*this);
    }
    at::Tensor generated(const at::Tensor& z) { return g2->forward(at::tanh(g1->forward(z))); }
    torch::nn::Linear g1{4, 5}, g2{5, 4}, discriminator{4, 1};
  };
  const auto loop = [](Pair& net, torch::optim::Optimizer* of_generator, torch::optim::Optimizer* of_discriminator, const auto& step) {
    for (int i = 1; i <= 3; ++i) {
      net.discriminator->zero_grad();
      const at::Tensor fake = net.generated(at::ones({2, 4}) * i);
      net.discriminator->forward(fake.detach()).square().sum().backward();
      step(of_discriminator);
      net.g1->zero_grad();
      net.g2->zero_grad();
      net.discriminator->forward(fake).square().sum().backward();
      step(of_generator);
    }
  };
  Pair whole;
  const auto of_whole = whole.parameters();
  const auto g = make_adam({of_whole.begin(), of_whole.begin() + 4}), d = make_adam(whole.discriminator->parameters());
  loop(whole, g.get(), d.get(), [](torch::optim::Optimizer* optimizer) { optimizer->step(); });
  for (const int stage : {1, 2}) {
    run_ranks(2, [&](World& world) {
      Pair net;
      ShardedDataParallel zero(net, {.shard = world.group()}, {.stage = stage, .average = true, .find_unused_parameters = true});
      const auto of = [&](const std::string& part) {
        return zero_optimizer(zero, [&](const std::vector<nn::NamedParameter>& updated) {
          std::vector<at::Tensor> parts;
          for (const auto& each : updated) {
            if (each.name.starts_with(part)) parts.push_back(each.tensor);
          }
          return make_adam(parts);
        });
      };
      auto generator = of("g"), discriminator = of("d");
      loop(net, &generator.inner(), &discriminator.inner(),
           [&](const torch::optim::Optimizer* optimizer) { optimizer == &generator.inner() ? generator.step() : discriminator.step(); });
      EXPECT_LT(largest_difference(weights_of(net), weights_of(whole)), 10 * parity) << "stage " << stage;
    });
  }
}

TEST(ZeroPlainLoop, AClearBehindAnEnginesStepIsOne) {
  for (const bool set_to_none : {true, false}) {
    run_ranks(2, [&](World& world) {
      Net net, other;
      ShardedDataParallel zero(net, {.shard = world.group()}, {.stage = 2}), expected(other, {.shard = world.group()}, {.stage = 2});
      const Batch mine = part_of(whole_batch(samples), 2, world.rank());
      run_step(net, zero, mine);
      net.zero_grad(set_to_none);
      backward(net, mine);
      backward(other, mine);
      for (size_t i = 0; i < zero.updated().size(); ++i) EXPECT_TRUE(at::equal(zero.updated()[i].tensor.grad(), expected.updated()[i].tensor.grad())) << i;
    });
  }
}

TEST(ZeroPlainLoop, AGradientOfThisRankAloneIsNotAddedTo) {
  for (const int ranks : {2, 3}) {
    for (const int stage : {1, 2}) {
      for (const bool find_unused : {false, true}) {
        run_ranks(ranks, [&](World& world) {
          Net net;
          ShardedDataParallel zero(net, {.shard = world.group()}, {.stage = stage, .sizes = small_buckets, .find_unused_parameters = find_unused});
          const Batch mine = part_of(whole_batch(samples), ranks, world.rank());
          const auto put = [&](const std::vector<at::Tensor>& gradients) {
            for (size_t i = 0; i < gradients.size(); ++i) net.parameters()[i].mutable_grad() = gradients[i].clone();
          };
          put(local_gradients(net, mine));
          EXPECT_THAT(refusal([&] { backward(net, mine); }), AllOf(HasSubstr("the program has put a gradient on 'scale'"), HasSubstr("on all ranks")));
          net.zero_grad();
          backward(net, mine);
          const std::vector<at::Tensor> once = [&] {
            std::vector<at::Tensor> parts;
            for (const auto& part : zero.updated()) parts.push_back(part.tensor.grad().clone());
            return parts;
          }();
          net.zero_grad();
          auto summed = local_gradients(net, mine);
          for (at::Tensor& gradient : summed) comm::all_reduce(world.group(), gradient);
          put(summed);
          backward(net, mine);
          for (size_t i = 0; i < once.size(); ++i) EXPECT_LT(largest_difference({zero.updated()[i].tensor.grad()}, {once[i] * 2}), parity) << i;
        });
      }
    }
  }
}

/// The contract's route for gradients that no backward pass brings.
TEST(ZeroPlainLoop, WhatIsPutOnAPartBehindAClearStays) {
  for (const bool set_to_none : {true, false}) {
    for (const bool kept : {true, false}) {
      for (const bool then_adds : {true, false}) {
        const auto loop = [&](Net& net, const auto& step, const auto& put, const Batch& first, const Batch& second, const Batch& third) {
          backward(net, first);
          step();
          net.zero_grad(set_to_none);
          put(local_gradients(net, second));
          if (!then_adds) return step();
          step();
          backward(net, third);
          step();
        };
        Net whole;
        const auto alone = make_sgd(whole.parameters());
        loop(
            whole, [&] { alone->step(); },
            [&](const std::vector<at::Tensor>& gradients) {
              for (size_t i = 0; i < gradients.size(); ++i) whole.parameters()[i].mutable_grad() = gradients[i];
            },
            whole_batch(samples, 0), whole_batch(samples, 1), whole_batch(samples, 2));
        for (const int stage : {1, 2}) {
          run_ranks(3, [&](World& world) {
            Net net;
            ShardedDataParallel zero(net, {.shard = world.group()}, {.stage = stage, .sizes = small_buckets});
            auto optimizer = zero_optimizer(zero, make_sgd);
            const std::vector<at::Tensor> parts = optimizer.inner().param_groups()[0].params();
            const auto mine = [&](int64_t i) { return part_of(whole_batch(samples, i), 3, world.rank()); };
            loop(
                net, [&] { optimizer.step(); },
                [&](std::vector<at::Tensor> gradients) {
                  for (at::Tensor& gradient : gradients) comm::all_reduce(world.group(), gradient);
                  const auto updated = kept ? std::vector<nn::NamedParameter>() : zero.updated();
                  for (size_t i = 0; i < parts.size(); ++i) {
                    at::Tensor part = kept ? parts[i] : updated[i].tensor;
                    int64_t begin = 0;
                    for (int rank = 0; rank < world.rank(); ++rank) begin += zero.slice_on(rank, part).numel();
                    part.mutable_grad() = gradients[i].reshape({-1}).narrow(0, begin, part.numel()).view(part.sizes()).clone();
                  }
                  (void)zero.updated();  // for a log, or a checkpoint
                },
                mine(0), mine(1), mine(2));
            EXPECT_LT(largest_difference(weights_of(net), weights_of(whole)), 10 * parity) << "stage " << stage << ", to none " << set_to_none;
          });
        }
      }
    }
  }
}

/// Whatever was made of a step's gradients before the model cleared them, as who leaves an update out does, is not added to the next step's.
TEST(ZeroPlainLoop, WhatWasMadeOfGradientsBeforeAClearIsCleared) {
  for (const auto& [set_to_none, looks] : {std::pair{true, false}, {false, false}, {true, true}, {false, true}}) {
    run_ranks(2, [&, set_to_none = set_to_none, looks = looks](World& world) {
      Net net;
      ShardedDataParallel zero(net, {.shard = world.group()}, {.stage = 2});
      const auto pass = [&] { backward(net, part_of(whole_batch(samples), 2, world.rank())); };
      const auto gradients = [&] {
        std::vector<at::Tensor> parts;
        for (const auto& part : zero.updated()) parts.push_back(part.tensor.grad().clone());
        return parts;
      };
      pass();
      const std::vector<at::Tensor> once = gradients();
      for (const auto& part : zero.updated()) at::Tensor(part.tensor).mutable_grad() = part.tensor.grad() * 0.5;
      net.zero_grad(set_to_none);
      if (looks) (void)zero.updated();  // for a log, or a checkpoint
      pass();
      EXPECT_TRUE(same_bits(gradients(), once)) << "to none " << set_to_none;
    });
  }
}

/// What a program that puts gradients on parts is written against, with a wrapper and without.
struct PuttingLoop {
  std::vector<at::Tensor> parts;  ///< held from the start, or asked for anew by `look`
  std::function<void()> step, look;
  std::function<void(int64_t)> backward;
  std::function<at::Tensor(size_t, const at::Tensor&)> part_of;  ///< this rank's elements of what is like parameter i

  at::Tensor like(const Net& net, size_t i) const { return part_of(i, net.parameters()[i].detach() * 0.7 + 0.3); }
  void put(const Net& net) const {
    for (size_t i = 0; i < parts.size(); ++i) at::Tensor(parts[i]).mutable_grad() = like(net, i);
  }
};

void expect_parity_of_putting(const std::string& name, const std::function<void(Net&, const PuttingLoop&)>& train) {
  Net whole;
  const auto alone = make_sgd(whole.parameters());
  train(whole, {.parts = whole.parameters(),
                .step = [&] { alone->step(); },
                .look = [] {},
                .backward = [&](int64_t i) { backward(whole, whole_batch(samples, i)); },
                .part_of = [](size_t, const at::Tensor& given) { return given.clone(); }});
  for (const int ranks : {2, 3}) {
    for (const int stage : {1, 2}) {
      run_ranks(ranks, [&](World& world) {
        Net net;
        ShardedDataParallel zero(net, {.shard = world.group()}, {.stage = stage, .sizes = small_buckets});
        auto optimizer = zero_optimizer(zero, make_sgd);
        PuttingLoop loop{.parts = optimizer.inner().param_groups()[0].params(),
                         .step = [&] { optimizer.step(); },
                         .look = [&] { (void)zero.updated(); },
                         .backward = [&](int64_t i) { backward(net, tessera::testing_support::part_of(whole_batch(samples, i), ranks, world.rank())); }};
        loop.part_of = [&](size_t i, const at::Tensor& given) {
          const at::Tensor& part = loop.parts[i];
          int64_t begin = 0;
          for (int rank = 0; rank < world.rank(); ++rank) begin += zero.slice_on(rank, part).numel();
          return given.reshape({-1}).narrow(0, begin, part.numel()).view(part.sizes()).clone();
        };
        train(net, loop);
        EXPECT_LT(largest_difference(weights_of(net), weights_of(whole)), 10 * parity) << name << ", " << ranks << " ranks, stage " << stage;
      });
    }
  }
}

/// What was put on the parts is the model's gradients, as what a pass has left: the model's next clear is theirs.
TEST(ZeroPlainLoop, AGradientThatWasPutIsClearedAsAnyOther) {
  for (const bool none_before : {true, false}) {
    for (const bool none_behind : {true, false}) {
      expect_parity_of_putting("put behind a clear", [&](Net& net, const PuttingLoop& loop) {
        for (int64_t i = 0; i < 2; ++i) {
          loop.backward(2 * i);
          loop.step();
          net.zero_grad(none_before);
          if (i == 1) loop.look();
          loop.put(net);
          loop.step();
          net.zero_grad(none_behind);
          loop.backward(2 * i + 1);
          loop.step();
        }
        net.zero_grad();
        loop.put(net);
        loop.step();
        net.zero_grad(none_behind);
        loop.step();
      });
    }
  }
  expect_parity_of_putting("by each parameter", [](Net& net, const PuttingLoop& loop) {
    const auto clear = [&] {
      for (at::Tensor parameter : net.parameters()) parameter.mutable_grad().reset();
    };
    loop.put(net);
    loop.step();
    clear();
    loop.backward(0);
    loop.step();
    clear();
    loop.put(net);
    loop.step();
    clear();
    loop.backward(1);
    loop.step();
  });
  expect_parity_of_putting("gradients of several losses", [](Net& net, const PuttingLoop& loop) {  // as PCGrad does
    for (int64_t step = 0; step < 3; ++step) {
      std::vector<std::vector<at::Tensor>> of;
      for (int64_t task = 0; task < 2; ++task) {
        net.zero_grad();
        loop.backward(2 * step + task);
        auto& gradients = of.emplace_back();
        for (const at::Tensor& part : loop.parts) gradients.push_back(part.grad().clone());
      }
      net.zero_grad();
      for (size_t i = 0; i < loop.parts.size(); ++i) at::Tensor(loop.parts[i]).mutable_grad() = of[0][i] * 0.4 + of[1][i] * 0.6;
      loop.step();
    }
  });
}

/// A clear of the model's is one of the parts when it is made, not when somebody looks.
TEST(ZeroPlainLoop, WhatIsPutOrAddedBehindAClearIsKeptByTheNextPassToo) {
  for (const bool to_none : {true, false}) {
    for (const bool looks : {true, false}) {
      for (const bool in_place : {true, false}) {
        for (const bool then_adds : {true, false}) {
          expect_parity_of_putting("to none " + std::to_string(to_none), [&](Net& net, const PuttingLoop& loop) {
            loop.backward(0);
            loop.step();
            net.zero_grad(to_none);
            if (looks) loop.look();
            for (size_t i = 0; i < loop.parts.size(); ++i) {
              at::Tensor& gradient = at::Tensor(loop.parts[i]).mutable_grad();
              ASSERT_EQ(gradient.defined(), !to_none);
              if (in_place && gradient.defined()) {
                gradient.add_(loop.like(net, i));
              } else {
                gradient = loop.like(net, i);
              }
            }
            if (then_adds) loop.backward(1);
            loop.step();
          });
        }
      }
    }
  }
}

/// A program that keeps what stood in grad() has cleared it all the same.
TEST(ZeroPlainLoop, AClearOfAGradientThatIsHeldIsOne) {
  expect_parity_of_putting("held", [](Net& net, const PuttingLoop& loop) {
    loop.backward(0);
    loop.step();
    const std::vector<at::Tensor> held = [&] {
      std::vector<at::Tensor> gradients;
      for (const at::Tensor& parameter : net.parameters()) gradients.push_back(parameter.grad());
      return gradients;
    }();
    net.zero_grad();
    loop.backward(1);
    loop.step();
  });
}

/// Between passes under no_sync() and the last one parts have no gradient, so one that is put there may mean more, or instead.
TEST(ZeroPlainLoop, AGradientThatIsPutWithinAnAccumulationIsRefusedByName) {
  for (const int ranks : {2, 3}) {
    for (const bool looks : {true, false}) {
      run_ranks(ranks, [&](World& world) {
        Net net, other;
        ShardedDataParallel zero(net, {.shard = world.group()}, {.stage = 2}), expected(other, {.shard = world.group()}, {.stage = 2});
        const auto parts = zero.updated();
        const auto put = [&] {
          for (const auto& part : parts) at::Tensor(part.tensor).mutable_grad() = at::ones_like(part.tensor.detach());
        };
        const auto pass = [&](Net& of, int64_t i) { backward(of, part_of(whole_batch(samples, i), ranks, world.rank())); };
        {
          const Attachment local = zero.no_sync();
          pass(net, 0);
        }
        put();
        if (looks) (void)zero.updated();
        EXPECT_THAT(refusal([&] { pass(net, 1); }), AllOf(HasSubstr("a gradient was put on this rank's part of 'scale'"), HasSubstr("no_sync")));
        net.zero_grad();
        for (const auto& part : parts) at::Tensor(part.tensor).mutable_grad().reset();
        pass(net, 1);
        pass(other, 1);
        for (size_t i = 0; i < parts.size(); ++i) EXPECT_TRUE(at::equal(parts[i].tensor.grad(), expected.updated()[i].tensor.grad())) << i;
        put();  // before the first pass it is one more
        {
          const Attachment local = zero.no_sync();
          EXPECT_NO_THROW(pass(net, 0));
        }
        EXPECT_NO_THROW(pass(net, 1));
      });
    }
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
