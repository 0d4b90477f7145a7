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

/// By operators, a forward that nobody goes back through shows whole parameters until somebody means their slices: an optimizer, when it updates and when it is
/// made, whether it writes by operators, reads first, or goes by pointers. "masters": of
/// 16-bit weights; "gathered": in 16 bits.
TEST(StaleUnits, AnOptimizerEndsAForwardThatIsOnlyLookedAt) {
  enum class Look { Never, BeforeTheOptimizer, BeforeEachUpdate };
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
        if (look == Look::BeforeTheOptimizer) looked_at = net(typed(whole_batch(samples, 0)).x);
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
      for (const Look look : {Look::BeforeTheOptimizer, Look::BeforeEachUpdate}) EXPECT_EQ(trained(ranks, look), unseen) << name << " on " << ranks;
    }
  }
}

}  // namespace
}  // namespace tessera
