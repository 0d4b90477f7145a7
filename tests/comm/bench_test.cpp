#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "tessera/comm/bench/measure.h"
#include "tessera/comm/bench/plot.h"
#include "tessera/comm/bench/row.h"
#include "tessera/comm/bench/workload.h"
#include "tessera/comm/collectives.h"
#include "tessera/comm/decorators/decorator.h"
#include "tessera/comm/testing.h"
#include "tessera/core/error.h"

namespace tessera::comm::bench {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

class Workloads : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, Workloads, ::testing::Values(2, 3, 8));

TEST_P(Workloads, EveryOperationIsRightOnTheEngine) {
  run_ranks(GetParam(), [](World& world) {
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

TEST(Workload, SumsAreExactInEveryDtype) {
  run_ranks(3, [](World& world) {
    for (const auto dtype : {at::kDouble, at::kBFloat16, at::kHalf, at::kLong, at::kInt, at::kChar, at::kByte}) {
      Workload(world.group(), {.op = "all_reduce", .bytes = 1600, .dtype = dtype}).check();
      Workload(world.group(), {.op = "reduce_scatter", .bytes = 1600, .dtype = dtype}).check();
    }
  });
}

TEST(Workload, RoundsToEqualPartsOnlyWhereThereAreParts) {
  run_ranks(3, [](World& world) {
    EXPECT_EQ(Workload(world.group(), {.op = "all_reduce", .bytes = 4096}).whole_bytes(), 4096);
    EXPECT_EQ(Workload(world.group(), {.op = "all_gather", .bytes = 4096}).whole_bytes(), 4092);
    EXPECT_EQ(Workload(world.group(), {.op = "all_to_all", .bytes = 4}).whole_bytes(), 12);
  });
}

/// Adds one to an element of what rank 1 gets out of all_reduce.
class Spoiler : public DecoratedEngine {
 public:
  using DecoratedEngine::DecoratedEngine;
  Work start(const Call& call) override {
    auto work = inner()->start(call);
    if (group().rank != 1 || call.op != Operation::AllReduce || call.outputs[0].numel() < 100) return work;
    work->wait();
    call.outputs[0].view(-1)[70].add_(1);
    return work;
  }
};

TEST(Workload, FindsAWrongElementAndTellsEveryRank) {
  const RunOptions options{.decorators = {[](auto inner, const GroupInfo& group) { return std::make_shared<Spoiler>(group, inner); }}};
  run_ranks(
      3,
      [](World& world) {
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
  run_ranks(2, [](World& world) {
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
  run_ranks(2, [](World& world) { EXPECT_GT(measure_link(world.group(), {.iterations = 1}), 1e6); });
}

Row sample(const std::string& op, const std::string& algorithm, int64_t bytes, double us) {
  return {.op = op,
          .backend = "shm",
          .algorithm = algorithm,
          .dtype = "fp32",
          .buffers = "plain",
          .bytes = bytes,
          .whole_bytes = bytes,
          .ranks = 4,
          .timing = {us, us / 2, 100},
          .link_bandwidth = 10e9};
}

TEST(Rows, BandwidthsAreThoseOfTheirDefinitions) {
  const auto row = sample("all_reduce", "engine", 1 << 20, 1000);
  EXPECT_DOUBLE_EQ(row.algorithm_bandwidth(), 1048576e3);
  EXPECT_DOUBLE_EQ(row.bus_bandwidth(), 1048576e3 * 1.5);
  EXPECT_DOUBLE_EQ(row.link_share(), 0.1572864);
  EXPECT_DOUBLE_EQ(bus_factor("all_gather", 4), 0.75);
  EXPECT_DOUBLE_EQ(bus_factor("broadcast", 4), 1);
  EXPECT_THROW(bus_factor("all_reduced", 4), InternalError);
}

TEST(Rows, SurviveJson) {
  const auto row = sample("all_to_all", "bruck", 12345, 6.78);
  const nlohmann::json json = row;
  EXPECT_EQ(json.at("time_us"), 6.78);
  EXPECT_EQ(json, nlohmann::json(nlohmann::json::parse(json.dump()).get<Row>()));
}

TEST(Rows, ReadSizesAsPeopleWriteThem) {
  EXPECT_EQ(parse_bytes("--bytes", "4096"), 4096);
  EXPECT_EQ(parse_bytes("--bytes", "4K"), 4096);
  EXPECT_EQ(parse_bytes("--bytes", "1MiB"), 1 << 20);
  EXPECT_EQ(parse_bytes("--bytes", "2G"), int64_t{2} << 30);
  for (const std::string bad : {"", "K", "0", "-4", "4X", "1.5M", "4 K", "99999999999999999999", "9000000G"}) {
    EXPECT_THAT([&] { parse_bytes("--bytes", bad); }, ::testing::ThrowsMessage<ConfigError>(HasSubstr("--bytes = " + bad + ":"))) << bad;
  }
}

TEST(Rows, WriteSizesAsPeopleReadThem) {
  EXPECT_EQ(format_size(4096), "4 KiB");
  EXPECT_EQ(format_size(3 << 20), "3 MiB");
  EXPECT_EQ(format_size(1000), "1000 B");
  EXPECT_EQ(format_size(0), "0 B");
}

TEST(Rows, TableLinesUp) {
  const auto text =
      format_table({sample("all_reduce", "engine", 4096, 2.5), sample("all_reduce", "ring", 128 << 20, 123456), sample("broadcast", "engine", 4, 1)});
  EXPECT_THAT(text, AllOf(HasSubstr("2.50"), HasSubstr("123456"), HasSubstr("128 MiB"), HasSubstr("\n\nbroadcast")));
  std::istringstream lines(text);
  std::string heading, row;
  std::getline(lines, heading);
  std::getline(lines, row);
  EXPECT_EQ(heading.find("bus GB/s") + 8, row.find("2.46") + 4);
}

TEST(Plot, DrawsALinePerSeriesAndSurvivesOddInput) {
  std::vector<Row> rows;
  for (const char* algorithm : {"engine", "ring", "tree"}) {
    for (const int64_t bytes : {1024, 65536, 1 << 22}) rows.push_back(sample("all_reduce", algorithm, bytes, static_cast<double>(bytes) / 1000));
  }
  const auto picture = plot(rows);
  size_t lines = 0;
  for (size_t at = picture.find("<polyline"); at != std::string::npos; at = picture.find("<polyline", at + 1)) ++lines;
  EXPECT_EQ(lines, 6u);  // three series on two axes
  EXPECT_THAT(picture, AllOf(HasSubstr("shm ring"), HasSubstr("1 MiB"), HasSubstr("all_reduce of 4 ranks")));
  EXPECT_THAT(plot({sample("all_reduce", "engine", 1000, 3)}), ::testing::Not(AnyOf(HasSubstr("nan"), HasSubstr("inf"))));
  EXPECT_THAT(plot({}), HasSubstr("nothing was measured"));
}

}  // namespace
}  // namespace tessera::comm::bench
