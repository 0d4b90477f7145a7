#include "cli/bench/pipeline.h"

#include <gtest/gtest.h>

#include "tessera/comm/testing.h"
#include "tests/test_device.h"

namespace tessera::bench {
namespace {

/// On the CPU, and on the device that the suite runs on.
TEST(PipelineBench, TimesActionsWhereTheyAreComputed) {
  const PipelineCase what{
      .hidden = 16, .heads = 2, .layers = 2, .tokens = 8, .global_size = 4, .micro_batches = 4, .ranks = 2, .device = testing_support::test_device()};
  PipelineCase alone = what;
  alone.ranks = 1;
  EXPECT_GT(measure_overhead(alone, {.iterations = 2}).step_us, 0);
  const auto recorder = std::make_shared<comm::Recorder>();
  comm::run_ranks(2,
                  [&](comm::World& world) {
                    PipelineCase mine = what;
                    mine.device = testing_support::test_device();
                    const PipelineRow step = measure_step(world, mine, {.iterations = 2});
                    const PipelineRow boundary = measure_boundary(world, *recorder, mine, {.iterations = 2});
                    EXPECT_TRUE(step.step_us > 0 && boundary.message_us > 0 && boundary.flops_per_token > 0);
                    EXPECT_EQ(boundary.compute_us > 0, world.rank() == 0);
                    if (world.rank() > 0) return;
                    EXPECT_TRUE(step.bubble > 0 && step.bubble < 1 && step.foretold > 0);
                  },
                  {.decorators = {comm::recording(recorder)}});
}

}  // namespace
}  // namespace tessera::bench
