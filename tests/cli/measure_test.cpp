#include "cli/bench/measure.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "cli/bench/workload.h"
#include "tessera/comm/collectives.h"
#include "tessera/comm/decorators/decorator.h"
#include "tessera/comm/testing.h"
#include "tessera/core/error.h"

namespace tessera::bench {
namespace {

using ::testing::HasSubstr;

class Workloads : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, Workloads, ::testing::Values(2, 3, 8));

TEST_P(Workloads, EveryOperationIsRightOnTheEngine) {
  comm::run_ranks(GetParam(), [](comm::World& world) {
    for (const auto& op : operation_names()) {
      for (const int64_t bytes : {4, 4096, 100'004}) {
        for (const auto buffers : {Buffers::Plain, Buffers::Shared}) {
          Workload workload(world.group(), {.op = op, .bytes = bytes, .buffers = buffers});
          EXPECT_NO_THROW(workload.check()) << op << " of " << bytes;
          workload.run();
        }
      }
    }
  });
}

TEST(EngineOf, ADeviceIsWhatServesIt) {
  EXPECT_EQ(part_for("shm+nccl", at::kCPU), "shm");
  EXPECT_EQ(part_for("shm+nccl", at::kCUDA), "nccl");
  EXPECT_EQ(part_for("two_level", at::kCUDA), "two_level");
}

TEST(Workload, SumsAreExactInEveryDtype) {
  comm::run_ranks(3, [](comm::World& world) {
    for (const auto dtype : {at::kDouble, at::kBFloat16, at::kHalf, at::kLong, at::kInt, at::kChar, at::kByte}) {
      Workload(world.group(), {.op = "all_reduce", .bytes = 1600, .dtype = dtype}).check();
      Workload(world.group(), {.op = "reduce_scatter", .bytes = 1600, .dtype = dtype}).check();
    }
  });
}

TEST(Workload, RoundsToEqualPartsOnlyWhereThereAreParts) {
  comm::run_ranks(3, [](comm::World& world) {
    EXPECT_EQ(Workload(world.group(), {.op = "all_reduce", .bytes = 4096}).whole_bytes(), 4096);
    EXPECT_EQ(Workload(world.group(), {.op = "all_gather", .bytes = 4096}).whole_bytes(), 4092);
    EXPECT_EQ(Workload(world.group(), {.op = "all_to_all", .bytes = 4}).whole_bytes(), 12);
  });
}

/// Adds one to an element of what rank 1 gets out of all_reduce.
class Spoiler : public comm::DecoratedEngine {
 public:
  using DecoratedEngine::DecoratedEngine;
  comm::Work start(const comm::Call& call) override {
    auto work = inner()->start(call);
    if (group().rank != 1 || call.op != comm::Operation::AllReduce || call.outputs[0].numel() < 100) return work;
    work->wait();
    call.outputs[0].view(-1)[70].add_(1);
    return work;
  }
};

TEST(Workload, FindsAWrongElementAndTellsEveryRank) {
  const comm::RunOptions options{.decorators = {[](auto inner, const comm::GroupInfo& group) { return std::make_shared<Spoiler>(group, inner); }}};
  comm::run_ranks(
      3,
      [](comm::World& world) {
        Workload workload(world.group(), {.op = "all_reduce", .bytes = 4096});
        try {
          workload.check();
          ADD_FAILURE() << "a wrong sum passed";
        } catch (const CommError& e) {
          EXPECT_THAT(e.what(), HasSubstr("all_reduce of group world"));
          EXPECT_THAT(e.what(), HasSubstr(world.rank() == 1 ? "element 70 is" : "another rank's result is wrong"));
        }
      },
      options);
}

TEST(Plan, MakesSamplesLongEnoughForTheClock) {
  const auto fast = plan_calls(1e-6, {.seconds = 0.5});
  EXPECT_EQ(fast.batch, 200);
  EXPECT_EQ(fast.samples, 2000);
  const auto slow = plan_calls(0.2, {.seconds = 0.5});
  EXPECT_EQ(slow.batch, 1);
  EXPECT_EQ(slow.samples, 5);
  EXPECT_EQ(slow.warm_up, 1);
}

TEST(Plan, KeepsTheNumberOfCallsAskedFor) {
  for (const int64_t iterations : {1, 7, 100, 997}) {
    const auto plan = plan_calls(1e-6, {.iterations = iterations});
    EXPECT_EQ(plan.batch * plan.samples, iterations);
    EXPECT_LE(plan.warm_up, iterations);
  }
}

TEST(Measure, IsTheSlowestRanksTimeOnEveryRank) {
  comm::run_ranks(2, [](comm::World& world) {
    const auto timing = measure(world.group(),
                                [&] {
                                  if (world.rank() == 1) std::this_thread::sleep_for(std::chrono::milliseconds(3));
                                  barrier(world.group());
                                },
                                {.iterations = 3});
    EXPECT_EQ(timing.calls, 3);
    EXPECT_GE(timing.min_us, 2900);
    EXPECT_GE(timing.median_us, timing.min_us);
  });
}

TEST(Measure, FindsALinkThatMovesBytes) {
  comm::run_ranks(2, [](comm::World& world) { EXPECT_GT(measure_link(world.group(), {.iterations = 1}), 1e6); });
}

TEST(Workload, KnowsWhatPassesABus) {
  EXPECT_DOUBLE_EQ(bus_factor("all_gather", 4), 0.75);
  EXPECT_DOUBLE_EQ(bus_factor("broadcast", 4), 1);
  EXPECT_THROW(bus_factor("all_reduced", 4), InternalError);
}

}  // namespace
}  // namespace tessera::bench
