#include "tessera/data_parallel/distributed_data_parallel.h"

#include <gmock/gmock.h>
#include <nlohmann/json.hpp>

#include "support.h"
#include "tessera/comm/backends/record.h"
#include "tessera/comm/collectives.h"
#include "tessera/core/memory.h"
#include "tessera/nn/meta.h"

namespace tessera {
namespace {

using comm::run_ranks;
using comm::World;
using ::testing::HasSubstr;
using namespace testing_support;

class WorldSizes : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ddp, WorldSizes, ::testing::Values(1, 2, 3, 5, 8));

TEST_P(WorldSizes, EqualsOneProcessAndAllRanksTheSameBits) {
  const int ranks = GetParam();
  constexpr int steps = 4;
  const auto expected = one_process(steps);
  std::vector<std::vector<std::vector<at::Tensor>>> seen(ranks);
  run_ranks(ranks, [&](World& world) {
    Net net;
    DistributedDataParallel ddp(net, world.group(), {.sizes = small_buckets});
    for (int step = 0; step < steps; ++step) {
      run_step(net, ddp, part_of(whole_batch(samples, step), ranks, world.rank()));
      seen[world.rank()].push_back(gradients_of(net));
      sgd(net, 0.05);
    }
  });
  for (int step = 0; step < steps; ++step) {
    EXPECT_LT(largest_difference(seen[0][step], expected[step]), parity) << "step " << step;
    for (int rank = 1; rank < ranks; ++rank) EXPECT_TRUE(same_bits(seen[rank][step], seen[0][step])) << "step " << step << " rank " << rank;
  }
}

TEST_P(WorldSizes, AverageDividesByTheRanks) {
  const int ranks = GetParam();
  run_ranks(ranks, [&](World& world) {
    Net net, reference;
    DistributedDataParallel ddp(net, world.group(), {.average = true});
    run_step(net, ddp, whole_batch(samples));
    backward(reference, whole_batch(samples));
    EXPECT_LT(largest_difference(gradients_of(net), gradients_of(reference)), parity);
  });
}

TEST_P(WorldSizes, AccumulationEqualsOneBackward) {
  const int ranks = GetParam();
  const auto expected = one_process(1);
  run_ranks(ranks, [&](World& world) {
    Net net;
    DistributedDataParallel ddp(net, world.group(), {.sizes = small_buckets});
    ddp.begin_step();
    const Batch mine = part_of(whole_batch(samples), ranks, world.rank());
    const int64_t passes = mine.x.size(0);
    for (int64_t i = 0; i < passes; ++i) {
      const Attachment local = i + 1 < passes ? ddp.no_sync() : Attachment();
      backward(net, part_of(mine, static_cast<int>(passes), static_cast<int>(i)));
    }
    ddp.finish();
    EXPECT_LT(largest_difference(gradients_of(net), expected[0]), parity);
  });
}

TEST(Ddp, ParitySeesARankThatIsDropped) {
  const auto expected = one_process(1);
  run_ranks(3, [&](World& world) {
    Net net;
    DistributedDataParallel ddp(net, world.group(), {});
    Batch mine = part_of(whole_batch(samples), 3, world.rank());
    ddp.begin_step();
    (loss_of(net.forward(mine.x), mine.y, samples) * (world.rank() == 1 ? 0.0 : 1.0)).backward();
    ddp.finish();
    EXPECT_GT(largest_difference(gradients_of(net), expected[0]), 100 * parity);
  });
}

TEST(Ddp, GradientsAreViewsOfTheBucketsInEveryStep) {
  run_ranks(2, [&](World& world) {
    Net net;
    DistributedDataParallel ddp(net, world.group(), {.sizes = {.bucket_bytes = 1 << 20, .first_bucket_bytes = 1 << 20}});
    std::vector<const void*> before;
    for (int step = 0; step < 3; ++step) {
      run_step(net, ddp, whole_batch(samples, step));
      std::vector<const void*> now;
      for (const at::Tensor& parameter : net.parameters()) {
        EXPECT_EQ(parameter.grad().storage().data(), net.scale.grad().storage().data());
        now.push_back(parameter.grad().const_data_ptr());
      }
      if (step == 2) EXPECT_EQ(now, before);  // the plan changed after the first step only
      before = now;
    }
  });
}

TEST(Ddp, ThePlanIsRebuiltFromRankZerosOrder) {
  std::vector<BucketPlan> plans(3);
  run_ranks(3, [&](World& world) {
    Net net;
    DistributedDataParallel ddp(net, world.group(), {.sizes = small_buckets});
    EXPECT_FALSE(ddp.plan().observed);
    EXPECT_EQ(ddp.plan().buckets[0].slots[0].name, "middle.bias");
    run_step(net, ddp, whole_batch(samples));
    plans[world.rank()] = ddp.plan();
    run_step(net, ddp, whole_batch(samples));
    EXPECT_EQ(ddp.plan(), plans[world.rank()]);
    EXPECT_GT(ddp.statistics().num_early, 1);
  });
  EXPECT_TRUE(plans[0].observed);
  EXPECT_THAT(plans[0].buckets.front().slots.front().name, ::testing::StartsWith("last."));
  EXPECT_THAT(plans[0].buckets.back().slots.back().name, ::testing::StartsWith("first."));
  EXPECT_EQ(plans[1], plans[0]);
  EXPECT_EQ(plans[2], plans[0]);
}

TEST(Ddp, WithThePlanOfACheckpointTheBitsRepeat) {
  constexpr int ranks = 4;
  std::vector<at::Tensor> uninterrupted, resumed, fresh;
  run_ranks(ranks, [&](World& world) {
    Net net;
    BucketPlan plan;
    {
      DistributedDataParallel ddp(net, world.group(), {.sizes = small_buckets});
      run_step(net, ddp, part_of(whole_batch(samples, 0), ranks, world.rank()));
      plan = bucket_plan_from_json(to_json(ddp.plan()));
      run_step(net, ddp, part_of(whole_batch(samples, 1), ranks, world.rank()));
      if (world.rank() == 0) uninterrupted = gradients_of(net);
    }
    DistributedDataParallel ddp(net, world.group(), {.sizes = {.bucket_bytes = 1, .first_bucket_bytes = 1}, .plan = plan});
    run_step(net, ddp, part_of(whole_batch(samples, 1), ranks, world.rank()));
    EXPECT_EQ(ddp.plan(), plan);
    if (world.rank() == 0) resumed = gradients_of(net);
  });
  EXPECT_TRUE(same_bits(resumed, uninterrupted));
}

TEST(Ddp, CommunicatesOncePerStepAndBucketWhateverTheAccumulation) {
  std::vector<std::shared_ptr<comm::Recorder>> recorders{std::make_shared<comm::Recorder>(), std::make_shared<comm::Recorder>()};
  const auto decorator = [&](auto inner, const comm::GroupInfo& group) { return comm::make_record_engine(recorders[group.rank], group, inner); };
  run_ranks(2,
            [&](World& world) {
              Net net;
              DistributedDataParallel ddp(net, world.group(), {.sizes = small_buckets});
              for (int step = 0; step < 2; ++step) {
                recorders[world.rank()]->clear();
                ddp.begin_step();
                for (int pass = 0; pass < 3; ++pass) {
                  const Attachment local = pass < 2 ? ddp.no_sync() : Attachment();
                  backward(net, whole_batch(samples));
                  if (pass < 2) EXPECT_TRUE(recorders[world.rank()]->records().empty());
                }
                ddp.finish();
              }
              const auto records = recorders[world.rank()]->records();
              ASSERT_EQ(records.size(), ddp.plan().buckets.size());
              for (size_t i = 0; i < records.size(); ++i) {
                EXPECT_EQ(records[i].op, "all_reduce");
                EXPECT_EQ(records[i].bytes, ddp.plan().buckets[i].bytes());
                EXPECT_EQ(records[i].site, "ddp.bucket");
              }
              EXPECT_EQ(ddp.statistics().bytes, ddp.plan().bytes());
              EXPECT_EQ(ddp.statistics().num_collectives, static_cast<int64_t>(records.size()));
              EXPECT_EQ(ddp.statistics().num_early, static_cast<int64_t>(records.size()));
              EXPECT_GE(ddp.statistics().exposed_s, 0);
            },
            {.decorators = {decorator}});
}

TEST(Ddp, AGroupOfOneLeavesAutogradAlone) {
  Net net;
  DistributedDataParallel ddp(net, comm::Group::self());
  EXPECT_TRUE(ddp.plan().empty());
  const auto expected = one_process(2);
  for (int step = 0; step < 2; ++step) {
    run_step(net, ddp, whole_batch(samples, step));
    EXPECT_TRUE(same_bits(gradients_of(net), expected[step]));
    EXPECT_NE(net.scale.grad().storage().data(), net.last->weight.grad().storage().data());
    sgd(net, 0.05);
  }
  EXPECT_EQ(ddp.statistics().num_collectives, 0);
}

TEST(Ddp, HoldsGradientsOnceAndCountsThem) {
  run_ranks(2, [&](World& world) {
    MemoryTracker tracker;
    const TrackMemory track(tracker);
    Net net;
    DistributedDataParallel ddp(net, world.group(), {.sizes = small_buckets});
    for (int step = 0; step < 3; ++step) {
      run_step(net, ddp, whole_batch(samples));
      EXPECT_EQ(tracker.current(MemoryCategory::Gradients), ddp.plan().bytes());
    }
    int64_t bytes = 0;
    for (const at::Tensor& parameter : net.parameters()) bytes += static_cast<int64_t>(parameter.nbytes());
    EXPECT_EQ(ddp.plan().bytes(), bytes);
  });
}

TEST(Ddp, ADryRunMakesTheSameCalls) {
  const auto step_twice = [](Net& net, const comm::Group& group, at::Device device) {
    DistributedDataParallel ddp(net, group, {.sizes = small_buckets});
    for (int step = 0; step < 2; ++step) {
      Batch batch = whole_batch(samples);
      run_step(net, ddp, {batch.x.to(device), batch.y.to(device)});
    }
  };
  std::vector<comm::Record> real;
  run_ranks(3, [&](World& world) {
    const auto recorder = std::make_shared<comm::Recorder>();
    comm::GroupInfo info{.name = "world", .rank = world.rank(), .size = 3, .ranks = {}};
    const comm::Group group(info, comm::make_record_engine(recorder, info, world.group().engine()));
    Net net;
    net.register_buffer("table", at::ones({6}));
    step_twice(net, group, at::kCPU);
    if (world.rank() == 1) real = recorder->records();
  });

  const auto recorder = std::make_shared<comm::Recorder>();
  World world = World::dry(3, 1, recorder);
  const auto net = on_meta([] { return std::make_shared<Net>(); });
  net->register_buffer("table", at::ones({6}, at::kMeta));
  step_twice(*net, world.group(), at::kMeta);
  const std::vector<comm::Record> planned = recorder->records();
  ASSERT_EQ(planned.size(), real.size());
  for (size_t i = 0; i < real.size(); ++i) {
    EXPECT_EQ(planned[i].op, real[i].op) << i;
    EXPECT_EQ(planned[i].shape, real[i].shape) << i;
    EXPECT_EQ(planned[i].dtype, real[i].dtype) << i;
    EXPECT_EQ(planned[i].site, real[i].site) << i;
  }
}

}  // namespace
}  // namespace tessera
