#include <chrono>
#include <latch>
#include <sstream>

#include <gmock/gmock.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/utils/convert_parameters.h>
#include <torch/optim/adam.h>
#include <torch/optim/sgd.h>
#include <torch/serialize.h>

#include "tessera/zero/zero_optimizer.h"
#include "tests/zero/plain_loop.h"
#include "tests/zero/support.h"

/// What makes replicas one: their buffers, weights that come from elsewhere, what ranks train; and wrappers beside each other.
namespace tessera {
namespace {

using ::testing::HasSubstr;
using namespace testing_support;

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

}  // namespace
}  // namespace tessera
