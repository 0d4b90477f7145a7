#include "cli/bench/bench.h"

#include <sstream>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "cli/bench/device.h"
#include "cli/bench/frame.h"
#include "cli/bench/plot.h"
#include "cli/bench/rows.h"
#include "tessera/core/error.h"
#include "tessera/plan/collective_time.h"
#include "tessera/plan/machine.h"

namespace tessera::cli {
namespace {

using ::testing::AllOf;
using ::testing::AnyOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

// Before any process is started.
TEST(BenchDevice, IsRefusedWhereItIsNotThere) {
  const auto reason_of = [](const auto& run) -> std::string {
    try {
      run();
    } catch (const ConfigError& error) {
      return error.what();
    }
    return "";
  };
  BenchPpFlags pp;
  pp.device = "cuda:77";
  EXPECT_THAT(reason_of([&] { bench_pp(pp); }), HasSubstr("--device"));
  BenchCpFlags cp;
  cp.device = "cuda:77";
  EXPECT_THAT(reason_of([&] { bench_cp(cp); }), HasSubstr("--device"));
}

// A file says what eight ranks reach, whatever number of them was measured.
TEST(BenchDevice, ItsFileTakesForItsAllReduceWhatWasMeasured) {
  for (const int ranks : {2, 3, 8}) {
    plan::Device device;
    const bench::AllReduces measured{.ranks = ranks, .small_bytes = 4096, .large_bytes = 16 << 20, .small = 1e-5, .large = 16e-3};
    bench::add_links(device, measured);
    const CollectiveEvent call{
        .op = "all_reduce", .group_size = ranks, .bytes = measured.large_bytes, .sent_bytes = 2 * measured.large_bytes * (ranks - 1) / ranks};
    const double seconds = plan::collective_cost(call, {.ranks = ranks, .hosts = 1, .per_host = ranks}, plan::machine_of(device)).seconds();
    EXPECT_NEAR(seconds, measured.large, 1e-4 * measured.large) << ranks;
  }
}

// Copies read their own command line, and are told all that this one was.
TEST(BenchCopies, AreToldWhatAllBenchmarksTake) {
  BenchPpFlags flags;
  flags.device = "cuda:1";
  flags.interface = "lo";
  flags.seconds = 0.25;
  flags.iterations = 3;
  EXPECT_THAT(
      command_of_copies(flags, "pp", {.backend = "gloo", .said = "", .arguments = {"--dim", "64"}}),
      ElementsAre("bench", "pp", "--dim", "64", "--backend", "gloo", "--device", "cuda:1", "--seconds", "0.25", "--iterations", "3", "--interface", "lo"));
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
}  // namespace tessera::cli
