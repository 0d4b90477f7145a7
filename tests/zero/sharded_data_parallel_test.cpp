#include "tessera/zero/sharded_data_parallel.h"

#include <gmock/gmock.h>

#include "tessera/memory/memory.h"
#include "tessera/nn/gradient_guard.h"
#include "tessera/nn/meta.h"
#include "tests/zero/support.h"

namespace tessera {
namespace {

using comm::run_ranks;
using comm::World;
using ::testing::HasSubstr;
using namespace testing_support;

TEST(Zero, HybridEqualsOneProcess) {
  for (const auto& [ranks, replicas] : std::vector<std::pair<int, int>>{{4, 2}, {6, 3}, {6, 2}, {3, 3}}) {
    for (const Way& way : ways) EXPECT_LT(trained_difference(ranks, replicas, way, 2), parity) << ranks << " ranks, " << replicas << " replicas";
  }
}

TEST(Zero, AGroupOfOneShardsNothing) {
  Net net;
  ShardedDataParallel zero(net, {}, {.stage = 2});
  run_step(net, zero, whole_batch(samples));
  EXPECT_TRUE(zero.layout().buckets.empty());
  EXPECT_TRUE(same_bits(gradients_of(net), one_process(1)[0]));
  ASSERT_EQ(zero.shards().size(), net.parameters().size());
  for (size_t i = 0; i < zero.shards().size(); ++i) EXPECT_TRUE(zero.shards()[i].tensor.is_same(net.parameters()[i]));
  EXPECT_EQ(zero.statistics().num_collectives, 0);
}

TEST(Zero, TrafficIsThatOfTheFormulas) {
  for (const auto& [ranks, replicas] : std::vector<std::pair<int, int>>{{2, 1}, {3, 1}, {4, 2}}) {
    for (const Way& way : ways) {
      for (const int passes : {1, 3}) {
        ShardLayout layout;
        const auto records = records_of_a_step(ranks, replicas, way, passes, layout);
        int64_t sent = 0;
        for (const auto& record : records) sent += record.sent_bytes;
        const int n = ranks / replicas;
        int64_t elements = 0;
        for (const auto& bucket : layout.buckets) elements += layout.numel(bucket);
        const int reductions = way.stage == 2 && way.accumulation == Accumulation::Sharded ? passes : 1;
        const int64_t within = 4 * (reductions + 1) * (n - 1) * elements / n, across = 4 * 2 * (replicas - 1) * (elements / n) / replicas;
        EXPECT_EQ(sent, within + across) << ranks << " ranks, " << replicas << " replicas, stage " << way.stage << ", " << passes << " micro-batches";
      }
    }
  }
}

TEST(Zero, BucketsAreReducedWhileBackwardRuns) {
  run_ranks(2, [&](World& world) {
    Net net;
    ShardedDataParallel zero(net, {.shard = world.group()}, {.stage = 2, .sizes = small_buckets});
    run_step(net, zero, whole_batch(samples));
    EXPECT_GT(zero.layout().buckets.size(), 2);
    EXPECT_EQ(zero.statistics().num_early, static_cast<int64_t>(zero.layout().buckets.size()));
    EXPECT_EQ(zero.statistics().num_collectives, zero.statistics().num_early);
    EXPECT_GE(zero.statistics().exposed.seconds(), 0);
  });
}

TEST(Zero, GradientsAreHeldAsTheStageSays) {
  for (const Way& way : ways) {
    run_ranks(2, [&](World& world) {
      MemoryTracker tracker;
      const TrackMemory track(tracker);
      Net net;
      ShardedDataParallel zero(net, {.shard = world.group()}, options_of(way));
      int64_t whole = 0;
      for (const auto& bucket : zero.layout().buckets) whole += 4 * zero.layout().numel(bucket);
      EXPECT_EQ(tracker.current(MemoryCategory::Parameters), whole);
      for (int step = 0; step < 2; ++step) {
        run_step(net, zero, whole_batch(samples), 2);
        EXPECT_EQ(tracker.current(MemoryCategory::Gradients), way.stage == 1 ? whole : whole / 2);
        for (const at::Tensor& parameter : net.parameters()) EXPECT_TRUE(nn::is_gradient_guard(parameter.grad()));
      }
    });
  }
}

/// `optional` is used where asked; `never` nowhere; `frozen` wants no gradient; `tied` is registered twice and used twice; three dtypes, a scalar, a transpose.
struct Odd : torch::nn::Module {
  Odd() {
    used = register_parameter("used", at::ones({3}));
    optional = register_parameter("optional", at::ones({3}));
    never = register_parameter("never", at::ones({2}));
    frozen = register_parameter("frozen", at::ones({2}), /*requires_grad=*/false);
    empty = register_parameter("empty", at::empty({0, 3}));
    tied = register_parameter("tied", at::full({3}, 2.0));
    register_parameter("tied_again", tied);
    scalar = register_parameter("scalar", at::full({}, 3.0, at::kDouble));
    half = register_parameter("half", at::ones({70}, at::kBFloat16));
    turned = register_parameter("turned", at::arange(12, at::kFloat).view({3, 4}).t());
  }
  at::Tensor forward(bool with_optional) {
    at::Tensor y = used * tied * tied;
    if (with_optional) y = y + optional;
    return y.sum() + empty.sum() + scalar.to(at::kFloat) + half.to(at::kFloat).sum() + (turned * turned).sum();
  }
  at::Tensor used, optional, never, frozen, empty, tied, scalar, half, turned;
};

TEST(Zero, UnusualParametersKeepTheirValuesAndGetTheirGradients) {
  for (const Way& way : ways) {
    SliceCollector gradients, values;
    run_ranks(3, [&](World& world) {
      Odd odd;
      ShardedDataParallel zero(odd, {.shard = world.group()},
                               {.stage = way.stage, .sizes = small_buckets, .accumulation = way.accumulation, .find_unused_parameters = true});
      EXPECT_TRUE(at::equal(odd.turned, at::arange(12, at::kFloat).view({3, 4}).t()));
      for (int step = 0; step < 2; ++step) {
        zero.begin_step();
        odd.forward(world.rank() == 1).backward();
        zero.finish();
      }
      for (const auto& shard : zero.shards()) {
        EXPECT_EQ(shard.tensor.grad().defined(), shard.name != "never" && shard.name != "frozen") << shard.name;
        EXPECT_EQ(shard.tensor.requires_grad(), shard.name != "frozen") << shard.name;
      }
      gradients.add_gradients(zero.shards());
      values.add_values(zero.shards());
    });
    const auto got = gradients.whole();
    EXPECT_TRUE(at::equal(got.at("used"), at::full({3}, 12.0)));
    EXPECT_TRUE(at::equal(got.at("optional"), at::ones({3})));
    EXPECT_TRUE(at::equal(got.at("tied"), at::full({3}, 12.0)));
    EXPECT_TRUE(at::equal(got.at("scalar"), at::full({}, 3.0, at::kDouble)));
    EXPECT_TRUE(at::equal(got.at("half"), at::full({70}, 3.0, at::kBFloat16)));
    EXPECT_TRUE(at::equal(got.at("turned"), 6 * at::arange(12, at::kFloat).view({3, 4}).t()));
    EXPECT_EQ(got.at("empty").numel(), 0);
    EXPECT_FALSE(got.contains("tied_again"));
    EXPECT_TRUE(at::equal(values.whole().at("turned"), at::arange(12, at::kFloat).view({3, 4}).t()));
  }
}

TEST(Zero, ReduceDtypeHoldsGradientsInIt) {
  for (const int ranks : {1, 2})
    run_ranks(ranks, [&](World& world) {
      Odd odd;
      ShardedDataParallel zero(odd, {.shard = world.group()}, {.stage = 2, .find_unused_parameters = true, .reduce_dtype = at::kDouble});
      zero.begin_step();
      odd.forward(true).backward();
      zero.finish();
      for (const auto& shard : zero.shards()) {
        if (shard.tensor.grad().defined()) EXPECT_EQ(shard.tensor.grad().scalar_type(), at::kDouble) << shard.name;
      }
    });
}

TEST(Zero, UnusedParametersAreRefusedByNameAndRankAndNobodyHangs) {
  run_ranks(3, [&](World& world) {
    Odd odd;
    odd.never.requires_grad_(false);
    ShardedDataParallel zero(odd, {.shard = world.group()}, {.stage = 2, .sizes = small_buckets});
    zero.begin_step();
    odd.forward(world.rank() != 1).backward();
    if (world.rank() == 1) {
      EXPECT_THAT(refusal([&] { zero.finish(); }),
                  HasSubstr("sharded data parallelism: on rank 1 of world, 1 of 7 parameters got no gradient in this step: 'optional'; "));
    } else {
      zero.finish();
    }
  });
}

/// A head that is tied by a view which the constructor keeps.
struct KeptViewImpl : torch::nn::Module {
  KeptViewImpl() {
    weight = register_parameter("weight", at::ones({7, 5}));
    head = weight.t();
  }
  at::Tensor weight, head;
};

TEST(Zero, AViewFromBeforeTheWrapperIsRefusedByName) {
  for (const int ranks : {2, 3}) {
    run_ranks(ranks, [&](World& world) {
      KeptViewImpl model;
      const at::Tensor x = at::ones({3, 7}), held = at::matmul(x, model.weight);  // the graph holds the weight's memory
      ShardedDataParallel zero(model, {.shard = world.group()}, {.stage = 2});
      EXPECT_NO_THROW(at::matmul(x, model.weight));
      EXPECT_THAT(refusal([&] { (void)at::matmul(at::ones({3, 5}), model.head); }),
                  ::testing::AllOf(HasSubstr("sharded data parallelism: "), HasSubstr("given a view of 'weight'"), HasSubstr("in forward")));
    });
  }
}

TEST(Zero, MisuseIsRefused) {
  run_ranks(2, [&](World& world) {
    Net net;
    EXPECT_THAT(refusal([&] { (void)ShardedDataParallel(net, {.shard = world.group()}, {.stage = 3}); }), HasSubstr("zero.stage = 3: "));
    EXPECT_THAT(refusal([&] { (void)ShardedDataParallel(net, {.shard = world.group()}, {.reduce_dtype = at::kLong}); }), HasSubstr("reduce_dtype = Long"));
    EXPECT_THAT(refusal([&] { (void)ShardedDataParallel(net, {.shard = world.group()}, {.network_dtype = at::kFloat}); }), HasSubstr("network_dtype = Float"));
    torch::nn::Module views("Views");
    const at::Tensor shared = at::ones({8});
    views.register_parameter("a", shared.narrow(0, 0, 4));
    views.register_parameter("b", shared.narrow(0, 3, 4));
    EXPECT_THAT(refusal([&] { (void)ShardedDataParallel(views, {.shard = world.group()}); }), HasSubstr("parameters 'a' and 'b' share memory"));
    torch::nn::Module follows("Follows");
    follows.register_parameter("weight", at::ones({4}));
    follows.register_buffer("shadow", follows.parameters()[0].detach());
    EXPECT_THAT(refusal([&] { (void)ShardedDataParallel(follows, {.shard = world.group()}); }),
                HasSubstr("parameter 'weight' and buffer 'shadow' share memory"));
    for (const Way& way : ways) {
      ShardedDataParallel zero(net, {.shard = world.group()}, options_of(way));
      EXPECT_THAT(refusal([&] { zero.finish(); }), HasSubstr("finish() was called without begin_step()"));
      zero.begin_step();
      backward(net, whole_batch(samples));
      EXPECT_THAT(refusal([&] { backward(net, whole_batch(samples)); }), HasSubstr("got another gradient after its bucket was reduced"));
      EXPECT_THAT(refusal([&] { zero.after_update(); }), HasSubstr("after_update() was called before finish()"));
      zero.finish();
      update(zero.shards());
      EXPECT_THAT(refusal([&] { zero.begin_step(); }), HasSubstr("after_update() was not called"));
      EXPECT_THAT(refusal([&] { backward(net, whole_batch(samples)); }), HasSubstr("after_update() was not called"));
      zero.after_update();
      zero.begin_step();
    }
  });
}

TEST(Zero, ReplicasThatDifferAreRefusedAtTheFirstStep) {
  run_ranks(4, [&](World& world) {
    Net net;
    if (world.rank() >= 2) net.middle->weight.data()[0][0] += 1e-6;
    ShardedDataParallel zero(net, groups_of(world, 2));
    EXPECT_THAT(refusal([&] { zero.begin_step(); }), HasSubstr("parameter 'middle.weight' of rank 0 of dp_replicate is another one on rank 1;"));
  });
}

}  // namespace
}  // namespace tessera
