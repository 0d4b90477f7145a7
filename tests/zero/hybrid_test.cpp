#include <algorithm>

#include <gmock/gmock.h>

#include "tests/refusal.h"
#include "tests/zero/plain_loop.h"
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

/// Of what one rank alone writes its own part lasts, which parts the replicas.
TEST(ZeroHybrid, WritesOfOneRankAreRefusedOnAll) {
  enum class Writes : char { Parameters, OtherMemory, Parts };
  for (const Way& way : ways) {
    for (const Writes writes : {Writes::Parameters, Writes::OtherMemory, Writes::Parts}) {
      for (const bool find_unused : {false, true}) {
        for (const auto& [ranks, replicas] : {Layout{4, 2}, Layout{3, 3}}) {
          run_ranks(ranks, [&, ranks = ranks, replicas = replicas](World& world) {
            Net net;
            auto options = options_of(way);
            options.find_unused_parameters = find_unused;
            ShardedDataParallel zero(net, groups_of(world, replicas), options);
            auto optimizer = zero_optimizer(zero, make_sgd);
            const auto step = [&] {
              optimizer.zero_grad();
              backward(net, part_of(whole_batch(samples), ranks, world.rank()));
              optimizer.step();
            };
            for (int i = 0; i < 2; ++i) step();
            if (world.rank() == 1) {
              const at::NoGradGuard no_grad;
              for (const auto& [name, tensor, aliases] : writes == Writes::Parts ? zero.shards() : nn::unique_parameters(net)) {
                if (writes == Writes::OtherMemory) tensor.set_data(tensor.detach() + 1);
                if (writes != Writes::OtherMemory) at::Tensor(tensor).add_(1);
              }
            }
            if (writes == Writes::Parts) zero.after_update();
            for (int i = 0; i < 3; ++i) {  // a loop that goes on after a refusal is refused again
              const std::string said = testing_support::refusal(step);
              const bool holds_it = groups_of(world, replicas).shard.rank() == (replicas == 2 ? 1 : 0);
              EXPECT_THAT(said, ::testing::HasSubstr(holds_it ? "sharded data parallelism: the replicas differ: parameter '"
                                                              : "sharded data parallelism: the replicas differ in what another rank of "));
              EXPECT_THAT(said, ::testing::HasSubstr("some ranks wrote parameters more often than others since the last step"));
              if (i > 0) optimizer.step();
            }
            for (const at::Tensor& parameter : net.parameters()) at::Tensor(parameter).requires_grad_(false);  // before its destruction
          });
        }
      }
    }
  }
}

/// What it writes in others' parts is theirs again after the next update.
TEST(ZeroHybrid, WritesOfOneRankThatLeaveItsPartAsItWasAreFine) {
  const auto recorder = std::make_shared<comm::Recorder>();
  const auto decorator = [&](auto inner, const comm::GroupInfo& group) {
    return group.rank == 0 ? comm::make_record_engine(recorder, group, inner) : std::move(inner);
  };
  for (const bool find_unused : {false, true}) {
    std::vector<std::vector<at::Tensor>> weights(4);
    run_ranks(4,
              [&](World& world) {
                Net net;
                ShardedDataParallel zero(net, groups_of(world, 2), {.stage = 1, .sizes = small_buckets, .find_unused_parameters = find_unused});
                auto optimizer = zero_optimizer(zero, make_sgd);
                for (int step = 0; step < 5; ++step) {
                  optimizer.zero_grad();
                  backward(net, part_of(whole_batch(samples), 4, world.rank()));
                  optimizer.step();
                  comm::barrier(world.group());
                  if (step == 3 && world.rank() == 0) {
                    EXPECT_EQ(std::ranges::count_if(recorder->records(), [](const auto& record) { return record.site == "zero.start"; }), 0);
                  }
                  if (step == 0 && world.rank() == 0) recorder->clear();
                  comm::barrier(world.group());
                  const at::NoGradGuard no_grad;
                  for (const at::Tensor& parameter : net.parameters()) {
                    if (world.rank() % 2 == 1) at::Tensor(parameter).mul_(1);  // on all that hold the same part
                  }
                  if (step < 3 || world.rank() != 1) continue;
                  std::vector<at::Tensor> kept;
                  for (const auto& shard : zero.shards()) kept.push_back(shard.tensor.detach().clone());
                  for (const at::Tensor& parameter : net.parameters()) at::Tensor(parameter).add_(1);
                  for (size_t i = 0; i < kept.size(); ++i) at::Tensor(zero.shards()[i].tensor).copy_(kept[i]);
                }
                optimizer.zero_grad();
                backward(net, part_of(whole_batch(samples), 4, world.rank()));
                optimizer.step();
                weights[world.rank()] = weights_of(net);
                for (const at::Tensor& parameter : net.parameters()) at::Tensor(parameter).requires_grad_(false);  // before its destruction
              },
              {.decorators = {decorator}});
    for (int rank = 1; rank < 4; ++rank) EXPECT_TRUE(same_bits(weights[rank], weights[0])) << "rank " << rank;
  }
}

}  // namespace
}  // namespace tessera
