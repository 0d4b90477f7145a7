// Two losses of one forward pass, each with a backward of its own, as actors and critics on one trunk have them; and adapters that come too late.

#include <memory>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/optim/sgd.h>

#include "tessera/comm/testing.h"
#include "tessera/fsdp/fully_shard.h"
#include "tessera/lora/lora.h"
#include "tessera/nn/linear.h"
#include "tessera/tensor_parallel/parallelize.h"
#include "tessera/zero/zero_optimizer.h"
#include "tests/nn/collect.h"
#include "tests/refusal.h"
#include "tests/train/wrapped.h"

namespace tessera {
namespace {

using namespace testing_support;
using ::testing::HasSubstr;

std::unique_ptr<torch::optim::Optimizer> sgd_of_losses(const std::vector<at::Tensor>& parts) {
  return std::make_unique<torch::optim::SGD>(parts, torch::optim::SGDOptions(0.05).momentum(0.9));
}

/// The first loss does not reach `last`.
struct TwoLosses {
  at::Tensor first, second;
};
TwoLosses losses_of(Net& net, const Batch& batch) {
  const at::Tensor hidden = at::tanh(net.middle(at::tanh(net.first(batch.x))) * net.scale);
  return {hidden.square().sum() / samples, loss_of(net.last(hidden), batch.y, samples)};
}

class SeveralLosses : public ::testing::TestWithParam<std::string> {};
INSTANTIATE_TEST_SUITE_P(, SeveralLosses, ::testing::ValuesIn(techniques), [](const auto& info) { return info.param; });

TEST_P(SeveralLosses, TheLastOneMeetsTheOtherRanks) {
  Net alone;
  const auto optimizer = sgd_of_losses(alone.parameters());
  for (int step = 0; step < 3; ++step) {
    optimizer->zero_grad();
    const auto [first, second] = losses_of(alone, whole_batch(samples, step));
    first.backward({}, /*retain_graph=*/true);
    second.backward();
    optimizer->step();
  }
  const std::vector<at::Tensor> expected = values_of(alone);
  for (const int ranks : {1, 2, 3}) {
    comm::run_ranks(ranks, [&](comm::World& world) {
      Net net;
      const auto wrapper = wrap_by(GetParam(), net, {.shard = world.group()});
      auto sharded = zero_optimizer(*wrapper, sgd_of_losses);
      for (int step = 0; step < 3; ++step) {
        sharded.zero_grad();
        const auto [first, second] = losses_of(net, part_of(whole_batch(samples, step), world.size(), world.rank()));
        {
          const auto held = wrapper->no_sync();
          first.backward({}, /*retain_graph=*/true);
        }
        second.backward();
        sharded.step();
      }
      unshard_all({wrapper.get()});
      const std::vector<at::Tensor> trained = values_of(net);
      for (size_t i = 0; i < expected.size(); ++i)
        EXPECT_LT((trained[i] - expected[i]).abs().max().item<double>(), 1e-6) << GetParam() << ", " << ranks << " ranks";
    });
  }
}

struct Narrow : torch::nn::Module {
  Narrow() {
    register_module("up", up);
    fill_parameters(*this);
  }
  nn::Linear up{nn::LinearOptions(3, 2)};
};

/// A wrapper would neither sum their gradients nor update them, and with few rows one rank holds the whole of a slice.
TEST_P(SeveralLosses, AdaptersComeBeforeTheWrapper) {
  for (const int ranks : {1, 2, 3}) {
    comm::run_ranks(ranks, [&](comm::World& world) {
      Narrow net;
      const auto wrapper = wrap_by(GetParam(), net, {.shard = world.group()});
      EXPECT_THAT(refusal([&] { (void)lora::attach(net, {.modules = {"up"}, .rank = 1}); }), HasSubstr("LoRA of 'up': the model is wrapped already"));
    });
  }
}

/// Whole again, a model is as good as one that was never sharded.
TEST(AdaptersBehind, UnshardAreAttached) {
  comm::run_ranks(2, [&](comm::World& world) {
    Narrow net;
    const auto sharded = fully_shard(net, world.group());
    unshard(net);
    const auto adapted = lora::attach(net, {.modules = {"up"}, .rank = 1});
    net.up->forward(at::ones({1, 3})).sum().backward();
    EXPECT_TRUE(net.up->named_parameters()["lora_b"].grad().defined());
  });
}

/// Of whose gradient each rank has the term of its positions, adapters would have terms that nobody knows.
TEST(AdaptersBehind, ACutSequenceAreRefused) {
  comm::run_ranks(2, [&](comm::World& world) {
    Narrow net;
    const auto parallel = parallelize_module(net, world.group(), {{"up", SequenceParallel{}}});
    EXPECT_THAT(refusal([&] { (void)lora::attach(net, {.modules = {"up"}, .rank = 1}); }), HasSubstr("or ranks have terms of its gradient"));
  });
}

}  // namespace
}  // namespace tessera
