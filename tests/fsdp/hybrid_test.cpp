#include <algorithm>
#include <memory>

#include <gmock/gmock.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/optim/sgd.h>

#include "tessera/comm/backends/record.h"
#include "tessera/comm/collectives.h"
#include "tessera/fsdp/fully_shard.h"
#include "tessera/mesh/mesh.h"
#include "tests/fsdp/support.h"
#include "tests/refusal.h"

/// Two copies of a model, each sharded over two ranks: what has to reach all four of them, not only those that share a shard.
namespace tessera {
namespace {

using comm::run_ranks;
using comm::World;
using namespace testing_support;

/// All ranks call the same modules; without `side`, the block's output does not reach the loss.
at::Tensor loss_with(DeepNet& net, const Batch& batch, bool side) {
  const at::Tensor h = net->first(batch.x), beside = net->blocks[0](h);
  return loss_of(net->last(net->out(net->norm(side ? beside : h))), batch.y, samples);
}

TEST(FullyShardHybrid, AParameterThatOneReplicaAloneUsesHasItsGradientOnAll) {
  for (const int replica : {0, 1}) {
    DeepNet whole;
    for (int rank = 0; rank < 4; ++rank) loss_with(whole, part_of(whole_batch(samples), 4, rank), rank / 2 == replica).backward();
    const Gradients expected = named_gradients(*whole);
    ASSERT_TRUE(expected.at("block0.w1.weight").defined());
    ASSERT_FALSE(expected.at("block1.w1.weight").defined());
    run_ranks(4, [&](World& world) {
      const Mesh mesh(world, {{"dp_replicate", 2}, {"dp_shard", 2}});
      for (const bool each : {true, false}) {
        DeepNet net;
        auto sharded = fully_shard(net, mesh["dp_shard"],
                                   {.wrap = "block*", .reduce_each_micro_batch = each, .find_unused_parameters = true, .replicate = mesh["dp_replicate"]});
        for (int step = 0; step < 2; ++step) {
          sharded->begin_step();
          loss_with(net, part_of(whole_batch(samples), 4, world.rank()), world.rank() / 2 == replica).backward();
          sharded->finish();
          EXPECT_LT(slice_difference(*net, expected), parity) << "rank " << world.rank() << ", used by replica " << replica;
        }
      }
    });
  }
}

/// Ranks with other slices are no replicas: their slices would be added up.
TEST(FullyShardHybrid, GroupsThatShareRanksAreRefused) {
  run_ranks(2, [](World& world) {
    DeepNet net;
    EXPECT_THAT(testing_support::refusal([&] { (void)fully_shard(net, world.group(), {.replicate = world.group()}); }),
                ::testing::HasSubstr("whose ranks hold different slices, and in 'world', whose ranks hold the same"));
    (void)fully_shard(net, comm::Group::self(), {.replicate = world.group()});
  });
}

/// Ranks of a shard hold other rows each; those that hold the same rows are compared once more, when the first step is complete.
TEST(FullyShardHybrid, WeightsThatOneReplicaLoadsBehindTheWrappingAreRefused) {
  run_ranks(4, [&](World& world) {
    const Mesh mesh(world, {{"dp_replicate", 2}, {"dp_shard", 2}});
    for (const ReplicaStart start : {ReplicaStart::Check, ReplicaStart::Trust}) {
      for (const bool alike : {true, false}) {
        DeepNet net;
        const auto sharded = fully_shard(net, mesh["dp_shard"], {.wrap = "block*", .replicate = mesh["dp_replicate"], .replicas = start});
        if (alike || world.rank() < 2) {
          const at::NoGradGuard no_grad;
          for (const at::Tensor& parameter : net->parameters()) parameter.mul_(0.5);
        }
        const auto step = [&] { backward_of(net, part_of(whole_batch(samples), 4, world.rank())); };
        if (alike || start == ReplicaStart::Trust) {
          step();
          continue;
        }
        for (int i = 0; i < 2; ++i) EXPECT_THAT(testing_support::refusal(step), ::testing::HasSubstr("fully_shard: the replicas differ: parameter '"));
      }
    }
  });
}

/// The first axis of groups tells what the second found, so no rank goes on alone.
TEST(FullyShardHybrid, ABufferOfAnotherSizeOnOneRankIsRefusedOnAll) {
  for (const bool find_unused : {false, true}) {
    for (const bool by_calls : {false, true}) {
      run_ranks(4, [&](World& world) {
        const Mesh mesh(world, {{"dp_replicate", 2}, {"dp_shard", 2}});
        DeepNet net;
        net->register_buffer("mask", at::ones({2}));
        const auto sharded = fully_shard(net, mesh["dp_shard"], {.find_unused_parameters = find_unused, .replicate = mesh["dp_replicate"]});
        const auto step = [&] {
          if (by_calls) sharded->begin_step();
          backward_of(net, part_of(whole_batch(samples), 4, world.rank()));
          if (by_calls) sharded->finish();
        };
        EXPECT_NO_THROW(step());
        if (world.rank() == 3) net->named_buffers()["mask"].set_data(at::ones({5}));
        EXPECT_THAT(testing_support::refusal(step), ::testing::HasSubstr("data parallelism: buffers of the module "));
      });
    }
  }
}

/// With one shard a slice is the whole, so no shape tells.
TEST(FullyShardHybrid, AGradientFromBeforeTheWrapperIsRefusedWithOneShardToo) {
  run_ranks(2, [](World& world) {
    DeepNet net;
    const Batch mine = part_of(whole_batch(samples), 2, world.rank());
    loss_of(net(mine.x), mine.y, samples).backward();
    const auto sharded = fully_shard(net, comm::Group::self(), {.replicate = world.group()});
    for (int pass = 0; pass < 2; ++pass) {  // a loop that goes on after a refusal has cleared nothing
      EXPECT_THAT(refusal([&] { loss_of(net(mine.x), mine.y, samples).backward(); }), ::testing::HasSubstr("has met no other rank's"));
    }
  });
}

/// Gradients that the program has put are compared by every replica, or by none: also where one alone is within a forward, for a line of a log.
TEST(FullyShardHybrid, AForwardOfOneReplicaAloneIsNoneOfTheOthers) {
  for (const bool on_all : {true, false}) {
    run_ranks(2, [&](World& world) {
      Net net;
      const auto sharded = fully_shard(net, comm::Group::self(), {.replicate = world.group()});
      torch::optim::SGD optimizer(net.parameters(), 0.1);
      const Batch mine = part_of(whole_batch(samples), 2, world.rank());
      const auto log = [&] {
        if (on_all || world.rank() == 0) (void)net.forward(mine.x);
      };
      const auto ask = [&] { sharded->refuse_gradients_that_wait("zero_optimizer"); };  // as an optimizer does before its step
      for (int step = 0; step < 2; ++step) {
        loss_of(net.forward(mine.x), mine.y, samples).backward();
        log();
        EXPECT_NO_THROW(ask());
        optimizer.step();
        sharded->after_update();
        optimizer.zero_grad();
      }
      for (at::Tensor parameter : net.parameters()) parameter.mutable_grad() = at::full_like(parameter.detach(), world.rank() + 1.0);
      log();
      EXPECT_THAT(refusal(ask), ::testing::HasSubstr("fully_shard: the program has put a gradient on '"));
    });
  }
}

/// No more is a gradient that the program puts there.
TEST(FullyShardHybrid, AGradientOfThisRankAloneIsRefusedWithOneShardToo) {
  for (const bool find_unused : {false, true}) {
    for (const bool each : {true, false}) {
      run_ranks(3, [&](World& world) {
        DeepNet net;
        const Batch mine = part_of(whole_batch(samples), 3, world.rank());
        const auto sharded =
            fully_shard(net, comm::Group::self(), {.reduce_each_micro_batch = each, .find_unused_parameters = find_unused, .replicate = world.group()});
        std::vector<at::Tensor> parameters = net->parameters();
        std::erase_if(parameters, [](const at::Tensor& parameter) { return !parameter.requires_grad(); });
        const auto pass = [&] { loss_of(net(mine.x), mine.y, samples).backward(); };
        const auto step = [&] { sharded->refuse_gradients_that_wait("zero_optimizer"); };  // as an optimizer does before it
        const auto put = [&](bool summed) {
          const auto gradients = torch::autograd::grad({loss_of(net(mine.x), mine.y, samples)}, parameters);
          for (size_t i = 0; i < gradients.size(); ++i) {
            at::Tensor given = gradients[i].detach().clone();  // one tensor of a tied parameter is there twice
            if (summed) comm::all_reduce(world.group(), given);
            at::Tensor(parameters[i]).mutable_grad() = given;
          }
        };
        pass();
        EXPECT_NO_THROW(step());
        const at::Tensor once = parameters[0].grad().clone();
        net->zero_grad();
        put(/*summed=*/false);
        EXPECT_THAT(refusal(step), ::testing::HasSubstr("fully_shard: the program has put a gradient on '"));
        EXPECT_THAT(refusal(pass), ::testing::HasSubstr("fully_shard: the program has put a gradient on '"));
        net->zero_grad();
        put(/*summed=*/true);
        EXPECT_NO_THROW(step());
        EXPECT_NO_THROW(pass());
        EXPECT_LT((parameters[0].grad() - 2 * once).abs().max().item<double>(), parity);
        EXPECT_NO_THROW(step());
      });
    }
  }
}

/// Ranks that hold the same rows tell each other how often they wrote them, and those of a shard what was found.
TEST(FullyShardHybrid, WritesOfOneRankAreRefusedOnAll) {
  for (const int shards : {2, 1}) {
    for (const bool find_unused : {false, true}) {
      for (const bool exchanges : {false, true}) {
        for (const int before : {0, 2}) {
          run_ranks(2 * shards, [&](World& world) {
            const Mesh mesh(world, {{"dp_replicate", 2}, {"dp_shard", shards}});
            DeepNet net;
            const auto sharded =
                fully_shard(net, mesh["dp_shard"], {.wrap = "block*", .find_unused_parameters = find_unused, .replicate = mesh["dp_replicate"]});
            torch::optim::SGD optimizer = momentum(*net);
            const auto step = [&] {
              optimizer.zero_grad();
              backward_of(net, part_of(whole_batch(samples), world.size(), world.rank()));
              optimizer.step();
            };
            for (int i = 0; i < before; ++i) step();
            if (world.rank() == 1) {
              const at::NoGradGuard no_grad;
              for (const auto& [name, tensor, aliases] : nn::unique_parameters(*net)) {
                if (exchanges) tensor.set_data(tensor.detach() + 1);
                if (!exchanges) at::Tensor(tensor).add_(1);
              }
            }
            for (int i = 0; i < 3; ++i) {
              const std::string said = testing_support::refusal(step);
              const bool holds_it = world.rank() % shards == 1 % shards;
              EXPECT_THAT(said, ::testing::HasSubstr(holds_it ? "fully_shard: the replicas differ: parameter '"
                                                              : "fully_shard: the replicas differ in what another rank of "));
              if (before > 0) EXPECT_THAT(said, ::testing::HasSubstr("some ranks wrote parameters more often than others since the last step"));
              if (i > 0) optimizer.step();
            }
          });
        }
      }
    }
  }
}

/// One rank's evaluation by averaged weights, which it puts back; nothing is asked in other steps.
TEST(FullyShardHybrid, WritesOfOneRankThatLeaveItsRowsAsTheyWereAreFine) {
  for (const bool find_unused : {false, true}) {
    const auto recorder = std::make_shared<comm::Recorder>();
    const auto decorator = [&](auto inner, const comm::GroupInfo& group) {
      return group.rank == 0 ? comm::make_record_engine(recorder, group, inner) : std::move(inner);
    };
    run_ranks(4,
              [&](World& world) {
                const Mesh mesh(world, {{"dp_replicate", 2}, {"dp_shard", 2}});
                DeepNet net;
                const auto sharded =
                    fully_shard(net, mesh["dp_shard"], {.wrap = "block*", .find_unused_parameters = find_unused, .replicate = mesh["dp_replicate"]});
                torch::optim::SGD optimizer = momentum(*net);
                for (int step = 0; step < 5; ++step) {
                  optimizer.zero_grad();
                  EXPECT_NO_THROW(backward_of(net, part_of(whole_batch(samples), 4, world.rank())));
                  optimizer.step();
                  comm::barrier(world.group());
                  if (step == 3 && world.rank() == 0) {
                    EXPECT_EQ(std::ranges::count_if(recorder->records(), [](const auto& record) { return record.site == "fsdp.start"; }), 0);
                  }
                  if (step == 0 && world.rank() == 0) recorder->clear();
                  comm::barrier(world.group());
                  const at::NoGradGuard no_grad;
                  for (const at::Tensor& parameter : net->parameters()) {
                    if (world.rank() % 2 == 1) at::Tensor(parameter).mul_(0.5);  // on all that hold the same rows
                    if (step < 3 || world.rank() != 1) continue;
                    const at::Tensor kept = parameter.detach().clone();
                    at::Tensor(parameter).zero_();
                    at::Tensor(parameter).copy_(kept);
                  }
                }
              },
              {.decorators = {decorator}});
  }
}

}  // namespace
}  // namespace tessera
