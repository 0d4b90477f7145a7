// What steps say of the time in which they stood still for collectives, on a device with a time of its own: the simulated accelerator's (docs/testing.md).

#ifdef TESSERA_SIM_DEVICE

#include "tessera/comm/exposed_time.h"

#include "tessera/comm/collectives.h"
#include "tessera/data_parallel/distributed_data_parallel.h"
#include "tests/nn/net.h"
#include "tests/train/fixture.h"
#include "tests/train/slow_engine.h"

namespace tessera {
namespace {

using testing_support::kWork;
using testing_support::slowing;
using testing_support::Slowness;

class ExposedTimes : public testing_support::TrainFixture {
 protected:
  void SetUp() override {
    if (testing_support::test_device().is_cpu()) GTEST_SKIP() << "the CPU's time is the host's";
    TrainFixture::SetUp();
  }
};

// The last bucket has nothing left to hide behind; the first has the rest of backward.
TEST_F(ExposedTimes, WhatBackwardHidesIsNotExposed) {
  using namespace testing_support;
  // Exposed seconds of rank 0 in its third step, where the collective of a bucket takes as long as `seconds` says.
  const auto exposed = [](const std::function<double(size_t bucket, size_t buckets)>& seconds) {
    const auto slowness = std::make_shared<Slowness>();
    size_t next = 0, buckets = 0;
    slowness->seconds = [&](std::string_view site) { return site == "ddp.bucket" && buckets > 0 ? seconds(next++, buckets) : 0; };
    double exposed = 0;
    comm::run_ranks(2,
                    [&](comm::World& world) {
                      Net net;
                      DistributedDataParallel ddp(net, world.group(), {.sizes = small_buckets});
                      for (int step = 0; step < 3; ++step) {
                        if (world.rank() == 0 && step == 2) buckets = ddp.plan().buckets.size();
                        ddp.begin_step();
                        backward(net, whole_batch(samples));
                        ddp.finish();
                      }
                      if (world.rank() == 0) exposed = ddp.statistics().exposed.seconds();
                    },
                    {.decorators = {slowing(slowness)}});
    EXPECT_EQ(next, buckets);
    EXPECT_GT(buckets, 2);
    return exposed;
  };
  const double least = exposed([](size_t, size_t) { return kWork; });
  EXPECT_GT(least, 0);
  EXPECT_LT(least, 4 * kWork);
  EXPECT_NEAR(exposed([](size_t bucket, size_t) { return bucket == 0 ? 3 * kWork : kWork; }), least, 1e-12);
  EXPECT_NEAR(exposed([](size_t bucket, size_t all) { return bucket + 1 == all ? 2 : kWork; }), least + 2 - kWork, 1e-9);
  EXPECT_NEAR(exposed([](size_t, size_t all) { return 1.0 / static_cast<double>(all); }), 1, 1e-4);
}

TEST_F(ExposedTimes, AreThereForWhoAsksAtOnce) {
  comm::run_ranks(2, [](comm::World& world) {
    const at::Tensor x = at::ones({1000});
    comm::ExposedTime exposed;
    {
      const comm::ExposedTime::Scope scope(exposed, x.device());
      comm::all_reduce_async(world.group(), x).wait();
    }
    EXPECT_GT(exposed.seconds(), 0);
  });
}

TEST_F(ExposedTimes, StepsTellWhatTheirCollectivesTake) {
  const std::vector<std::vector<std::string>> layouts{{"zero.stage=0"}, {"zero.stage=1"},           {"zero.stage=2"},
                                                      {"zero.stage=3"}, {"run.deterministic=true"}, {"zero.stage=0", "comm.backend=shm"}};
  for (const auto& sets : layouts) {
    Config settings = config("llama", sets);
    settings.run.steps = 4;
    // Each of those that bring gradients and parameters a second, each that adds up norms ten.
    const auto slowness = std::make_shared<Slowness>();
    slowness->seconds = [](std::string_view site) { return site == "norm" ? 10 : site == "report" ? 0 : 1; };
    decorators_ = {slowing(slowness)};
    const bool staged = settings.comm.backend == "shm";  // the host waits, and the device's own time goes on in the copies alone
    const Trace trace = train(settings, 2);
    ASSERT_EQ(slowness->of_steps.size(), 4);
    for (size_t step = 1; step < 4; ++step) {
      const bool has_norm = settings.zero.stage > 0;
      const double took = slowness->of_steps[step] - (has_norm ? 10 : 0);
      EXPECT_GE(took, 1) << sets.front();
      const double shown = trace.steps[step].exposed_s;
      EXPECT_NEAR(shown, staged ? 0 : took, 1e-3) << sets.front() << ", step " << step;
      // Of the step before, for it is told before it is known.
      const RankTimes& told = trace.steps[step].ranks[0];
      if (step == 1 || staged) continue;
      EXPECT_NEAR(told.wait_s, slowness->of_steps[step - 1], 1e-3) << sets.front() << ", step " << step;
      EXPECT_GT(told.compute_s, 100 * kWork);
      EXPECT_LT(told.compute_s, 0.1);
    }
  }
}

}  // namespace
}  // namespace tessera

#endif
