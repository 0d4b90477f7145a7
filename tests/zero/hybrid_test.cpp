#include <algorithm>

#include <gmock/gmock.h>

#include "tests/refusal.h"
#include "tests/zero/support.h"

/// Two copies of a model, each sharded over two ranks: what has to reach all four of them, not only those that share a shard.
namespace tessera {
namespace {

using comm::run_ranks;
using comm::World;
using namespace testing_support;

/// `sometimes` is used where asked; `seen` is written as a batch norm writes its statistics.
struct Sometimes : torch::nn::Module {
  Sometimes() {
    always = register_parameter("always", at::ones({5}));
    sometimes = register_parameter("sometimes", at::ones({7}));
    seen = register_buffer("seen", at::zeros({3}));
  }
  at::Tensor forward(bool with) { return with ? always.sum() + (2 * sometimes).sum() : always.sum(); }
  at::Tensor always, sometimes, seen;
};

TEST(ZeroHybrid, AParameterThatOneReplicaAloneUsesHasItsGradientOnAll) {
  for (const Way& way : ways) {
    for (const std::vector<int>& users : std::vector<std::vector<int>>{{0, 1}, {2, 3}, {3}}) {
      run_ranks(4, [&](World& world) {
        Sometimes module;
        auto options = options_of(way);
        options.find_unused_parameters = true;
        ShardedDataParallel zero(module, groups_of(world, 2), options);
        const bool uses = std::ranges::find(users, world.rank()) != users.end();
        for (int step = 0; step < 2; ++step) {
          zero.begin_step();
          module.forward(uses).backward();
          zero.finish();
          for (const auto& shard : zero.shards()) {
            const double expected = shard.name == "always" ? 4 : 2.0 * static_cast<double>(users.size());
            ASSERT_TRUE(shard.tensor.grad().defined()) << shard.name << " on rank " << world.rank() << ", stage " << way.stage;
            EXPECT_TRUE(at::equal(shard.tensor.grad(), at::full_like(shard.tensor, expected))) << shard.name << " on rank " << world.rank();
          }
          zero.after_update();
        }
      });
    }
  }
}

TEST(ZeroHybrid, BuffersThatDifferByReplicaAreRankZerosWhenTheNextStepHasBegun) {
  for (const Way& way : ways) {
    run_ranks(4, [&](World& world) {
      Sometimes module;
      auto options = options_of(way);
      options.find_unused_parameters = true;
      ShardedDataParallel zero(module, groups_of(world, 2), options);
      for (int step = 0; step < 3; ++step) {
        zero.begin_step();
        if (step > 0) EXPECT_TRUE(at::equal(module.seen, at::full({3}, 10.0 * step))) << "rank " << world.rank() << ", step " << step << ": " << module.seen;
        module.seen.fill_(10.0 * (step + 1) + world.rank());  // as a forward pass does
        module.forward(true).backward();
        zero.finish();
        zero.after_update();
      }
    });
  }
}

TEST(ZeroHybrid, GroupsThatShareRanksAreRefused) {
  run_ranks(2, [&](World& world) {
    Net net;
    EXPECT_THAT(testing_support::refusal([&] { (void)ShardedDataParallel(net, ShardGroups{.shard = world.group(), .replicate = world.group()}); }),
                ::testing::HasSubstr("sharded data parallelism: rank "));
  });
}

}  // namespace
}  // namespace tessera
