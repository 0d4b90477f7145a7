// What fully_shard has gathered is of before an update. Optimizers of libtorch show their writes by operators; some of ours write by pointers.

#include <string>
#include <vector>

#include <ATen/ops/relu.h>
#include <gtest/gtest.h>

#include "tessera/comm/testing.h"
#include "tessera/fsdp/fully_shard.h"
#include "tessera/nn/layers.h"
#include "tessera/optim/optimizer.h"
#include "tessera/optim/whole_model.h"
#include "tessera/precision/master_weights.h"
#include "tessera/precision/policy.h"
#include "tests/nn/net.h"

namespace tessera {
namespace {

using namespace testing_support;
using comm::run_ranks;
using comm::World;

struct StackImpl : nn::Module {
  StackImpl() : block0(5, 7), block1(7, 7), block2(7, 3) {
    register_module("block0", block0);
    register_module("block1", block1);
    register_module("block2", block2);
    fill_parameters(*this);
  }
  at::Tensor forward(const at::Tensor& x) { return block2(at::relu(block1(at::relu(block0(x))))); }
  nn::Linear block0, block1, block2;
};
TESSERA_MODULE(Stack);

/// A forward pass that is only looked at leaves its units whole (reshard_after_forward = false, find_unused_parameters); then the optimizer steps, by the pass
/// before.
TEST(StaleUnits, OurOptimizersLeaveNone) {
  for (const std::string name : {"adamw", "lion", "adam8bit", "bf16 lion", "bf16 adamw"}) {
    for (const int ranks : {1, 2, 3}) {
      const auto trained = [&](bool reshard, bool find_unused = false) {
        std::vector<std::vector<at::Tensor>> gradients(static_cast<size_t>(ranks));
        run_ranks(ranks, [&](World& world) {
          Stack net;
          auto sharded = fully_shard(
              net, world.group(), {.wrap = "block*", .reshard_after_forward = reshard, .find_unused_parameters = find_unused, .trigger = ShardTrigger::Calls});
          OptimConfig config;
          config.name = name.substr(name.rfind(' ') + 1);
          if (name.starts_with("bf16")) config.state_dtype = "bf16";
          const auto optimizer = optim::make_optimizer(config, nn::unique_parameters(*net), optim::whole_model(*net, *sharded));
          for (int step = 0; step < 3; ++step) {
            const Batch mine = part_of(whole_batch(samples, step), world.size(), world.rank());
            EXPECT_GT(loss_of(net(mine.x), mine.y, samples).item<double>(), 0);
            if (step > 0) optimizer->step(0.1);
            net->zero_grad();
            loss_of(net(mine.x), mine.y, samples).backward();
          }
          for (const at::Tensor& parameter : net->parameters()) gradients[static_cast<size_t>(world.rank())].push_back(parameter.grad().detach().clone());
        });
        return gradients;
      };
      const auto gathered_again = trained(true);
      for (const auto& waited : {trained(false), trained(true, /*find_unused=*/true)}) {
        for (size_t rank = 0; rank < waited.size(); ++rank) EXPECT_TRUE(same_bits(waited[rank], gathered_again[rank])) << name << " on " << ranks;
      }
    }
  }
}

struct WideImpl : nn::Module {
  WideImpl() { register_module("layer", layer); }
  at::Tensor forward(const at::Tensor& x) { return layer(x); }
  nn::Linear layer{64, 65};
};
TESSERA_MODULE(Wide);
struct PlainWide : torch::nn::Module {
  PlainWide() { register_module("layer", layer); }
  at::Tensor forward(const at::Tensor& x) { return layer->forward(x); }
  torch::nn::Linear layer{64, 65};
};

/// There a view of a parameter is a forward's: what optimizers make of theirs is not.
TEST(StaleUnits, InEvaluationModeOurOptimizersUpdateSlicesToo) {
  const auto weights = [&](auto& net, const auto& forward, const std::string& name, const comm::Group& ranks, bool evaluates) {
    torch::nn::Module& module = *net;
    fill_parameters(module);
    auto sharded = fully_shard(module, ranks, {.average = true});
    OptimConfig config;
    config.name = name;
    const auto optimizer = optim::make_optimizer(config, nn::unique_parameters(module), optim::whole_model(module, *sharded));
    module.train(!evaluates);
    for (int step = 0; step < 2; ++step) {
      forward(at::ones({2, 64}) * (step + 1)).square().mean().backward();
      const c10::NoGradGuard no_grad;
      optimizer->step(0.01);
      for (const auto& parameter : module.parameters()) parameter.mutable_grad() = at::Tensor();
    }
    sharded->unshard();
    std::vector<at::Tensor> all;
    for (const auto& parameter : module.parameters()) all.push_back(parameter.detach().clone());
    return all;
  };
  for (const std::string name : {"lion", "adam8bit", "adafactor"}) {
    for (const int ranks : {1, 2, 3}) {
      run_ranks(ranks, [&](World& world) {
        for (const bool evaluates : {false, true}) {
          Wide ours, alone;
          auto plain = std::make_shared<PlainWide>();
          const auto expected = weights(alone, [&](const at::Tensor& x) { return alone(x); }, name, comm::Group::self(), false);
          // Three ranks' mean of one gradient has other last bits; a step is 0.01.
          const auto by_calls = weights(ours, [&](const at::Tensor& x) { return ours(x); }, name, world.group(), evaluates);
          const auto by_operators = weights(plain, [&](const at::Tensor& x) { return plain->forward(x); }, name, world.group(), evaluates);
          EXPECT_LT(largest_difference(by_calls, expected), 1e-3) << name << evaluates;
          EXPECT_LT(largest_difference(by_operators, expected), 1e-3) << name << evaluates;
        }
      });
    }
  }
}

/// By operators, a forward that nobody goes back through shows whole parameters until somebody means their slices: an optimizer, when it updates and when it is
/// made, whether it writes by operators, reads first, or goes by pointers. "masters": of
/// 16-bit weights; "gathered": in 16 bits.
TEST(StaleUnits, AnOptimizerEndsAForwardThatIsOnlyLookedAt) {
  enum class Look { Never, BeforeTheOptimizer, BeforeTheOptimizerUnrecorded, BeforeEachUpdate };
  for (const std::string name : {"adamw", "sgd", "lion", "adafactor", "muon", "adam8bit", "bf16 lion", "gathered adamw", "gathered sgd", "masters adamw",
                                 "masters sgd", "masters lion"}) {
    const auto trained = [&](int ranks, Look look) {
      std::vector<double> losses;
      run_ranks(ranks, [&](World& world) {
        Stack net;
        const bool masters = name.starts_with("masters");
        if (masters) net->to(at::kBFloat16);
        FullyShardOptions options{.trigger = ShardTrigger::Operators};
        if (name.starts_with("gathered")) options.param_dtype = at::kBFloat16;
        auto sharded = fully_shard(net, world.group(), options);
        OptimConfig config;
        config.name = name.substr(name.rfind(' ') + 1);
        config.weight_decay = 0.1;
        if (name.starts_with("bf16")) config.state_dtype = "bf16";
        const bool narrow = masters || options.param_dtype;
        const auto typed = [&](const Batch& batch) { return narrow ? Batch{batch.x.to(at::kBFloat16), batch.y} : batch; };
        at::Tensor looked_at;
        if (look == Look::BeforeTheOptimizer || look == Look::BeforeTheOptimizerUnrecorded) {
          const at::AutoGradMode recorded(look == Look::BeforeTheOptimizer);
          looked_at = net(typed(whole_batch(samples, 0)).x);
        }
        precision::Policy policy;
        if (masters) policy = precision::policy_from({.params = "bf16", .compute = "bf16", .master = "fp32"});
        const auto optimizer = precision::make_optimizer(config, policy, 3, nn::unique_parameters(*net), optim::whole_model(*net, *sharded));
        for (int step = 0; step < 3; ++step) {
          const Batch whole = whole_batch(samples, step), all = typed(whole), mine = typed(part_of(whole, world.size(), world.rank()));
          net->zero_grad();
          loss_of(net(mine.x), mine.y, samples).backward();
          if (look == Look::BeforeEachUpdate) looked_at = net(all.x);
          optimizer->step(0.01);
          const at::NoGradGuard no_grad;
          const double loss = loss_of(net(all.x), all.y, samples).item<double>();
          if (world.rank() == 0) losses.push_back(loss);
        }
      });
      return losses;
    };
    const auto one = trained(1, Look::Never);
    EXPECT_NE(one[0], one[2]) << name;
    for (const int ranks : {2, 3}) {
      const auto unseen = trained(ranks, Look::Never);
      for (size_t i = 0; i < one.size(); ++i)
        EXPECT_NEAR(unseen[i], one[i], (name.starts_with("masters") || name.starts_with("gathered") ? 1e-2 : 1e-5) * one[i]) << name;
      for (const Look look : {Look::BeforeTheOptimizer, Look::BeforeTheOptimizerUnrecorded, Look::BeforeEachUpdate})
        EXPECT_EQ(trained(ranks, look), unseen) << name << " on " << ranks;
    }
  }
}

}  // namespace
}  // namespace tessera
