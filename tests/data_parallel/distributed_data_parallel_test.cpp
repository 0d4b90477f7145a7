#include "tessera/data_parallel/distributed_data_parallel.h"

#include <gmock/gmock.h>
#include <nlohmann/json.hpp>

#include "support.h"
#include "tessera/comm/backends/record.h"
#include "tessera/comm/collectives.h"
#include "tessera/comm/decorators/inject.h"
#include "tessera/memory/memory.h"
#include "tessera/nn/meta.h"

namespace tessera {
namespace {

using comm::run_ranks;
using comm::World;
using ::testing::HasSubstr;
using namespace testing_support;

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
  std::vector<BucketLayout> plans(3);
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

/// Their numbers are places in memory.
TEST(Ddp, AnOrderThatArrivesDamagedIsNotUsed) {
  const auto faults = std::make_shared<comm::Decorator>(comm::fault_injection(comm::parse_faults("rank=1,op=broadcast,do=corrupt"), 1, 0));
  const comm::Decorator injected = [faults](std::shared_ptr<comm::Engine> inner, const comm::GroupInfo& group) {
    return group.rank == 1 ? (*faults)(std::move(inner), group) : inner;
  };
  EXPECT_THAT(
      [&] {
        run_ranks(2,
                  [&](World& world) {
                    Net net;
                    DistributedDataParallel ddp(net, world.group(), {.sizes = small_buckets});
                    for (int step = 0; step < 2; ++step) run_step(net, ddp, whole_batch(samples, step));
                  },
                  {.timeout = std::chrono::seconds(5), .decorators = {injected}});
      },
      ::testing::ThrowsMessage<CommError>(::testing::AllOf(HasSubstr("the order of gradients that rank 0 of group world gave out arrived damaged on rank 1"),
                                                           HasSubstr("which is no parameter's number"))));
}

TEST(Ddp, WithThePlanOfACheckpointTheBitsRepeat) {
  constexpr int ranks = 4;
  std::vector<at::Tensor> uninterrupted, resumed, fresh;
  run_ranks(ranks, [&](World& world) {
    Net net;
    BucketLayout plan;
    {
      DistributedDataParallel ddp(net, world.group(), {.sizes = small_buckets});
      run_step(net, ddp, part_of(whole_batch(samples, 0), ranks, world.rank()));
      plan = bucket_layout_from_json(to_json(ddp.plan()));
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
              EXPECT_GE(ddp.statistics().exposed.seconds(), 0);
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

}  // namespace
}  // namespace tessera
