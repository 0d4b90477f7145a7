// The same step on more ranks: where that stops helping, and what cutting sequences buys then.

#include "tessera/plan/scaling.h"

#include <optional>
#include <string>
#include <vector>

#include <gmock/gmock.h>

#include "tessera/core/error.h"
#include "tessera/plan/device.h"
#include "tests/refusal.h"
#include "tests/train/fixture.h"

namespace tessera::plan {
namespace {

using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;
using testing_support::refusal;

TEST(Knee, IsWhereADoublingTakesLessThanAQuarterOff) {
  using Seconds = std::vector<std::optional<double>>;
  EXPECT_EQ(knee_of(Seconds{8, 4, 2, 1}), std::nullopt);
  EXPECT_EQ(knee_of(Seconds{8, 4, 3.2, 3.1}), 1U);
  EXPECT_EQ(knee_of(Seconds{8, 6, 4.5}), std::nullopt) << "a quarter is enough";
  EXPECT_EQ(knee_of(Seconds{std::nullopt, 4, 2, std::nullopt}), 2U) << "nothing deals the step to more";
  EXPECT_EQ(knee_of(Seconds{std::nullopt, std::nullopt}), std::nullopt);
}

Tried taking(double seconds, LayoutChoice choice = {}) {
  return {.choice = std::move(choice), .peak_bytes = 1 << 20, .fits = true, .time = {.seconds = seconds}};
}

TEST(Findings, NameTheKneeAndWhatContextParallelismBuys) {
  Scaling scaling{.sequences = 4, .seq_len = 100, .points = {{.ranks = 2, .whole = taking(8)}, {.ranks = 4, .whole = taking(4)}, {.ranks = 8}, {.ranks = 16}}};
  scaling.knee = 4;
  EXPECT_THAT(findings_of(scaling),
              ElementsAre(HasSubstr("stops helping at 4 (4.00 s): no layout of 8 ranks deals them 4 sequences"), HasSubstr("buys nothing")));
  scaling.points[2].cut = taking(2.5, {.cp = 2});
  scaling.points[3].cut = taking(2, {.cp = 4});
  EXPECT_THAT(findings_of(scaling).back(),
              AllOf(HasSubstr("a step of 2.00 s on 16 ranks (cp 4"), HasSubstr("2 times as fast as at 4 ranks, for 4 times the ranks")));
  scaling.points[2].whole = taking(3.6);
  EXPECT_THAT(findings_of(scaling).front(), HasSubstr("8 take 3.60 s for the step, 10% less than 4"));
  scaling.points[2].whole = taking(2);
  scaling.points[3].cut = taking(2.2, {.cp = 4});
  scaling.points[3].whole = taking(2.75);
  EXPECT_THAT(findings_of(scaling).back(), HasSubstr("on 16 ranks (cp 4")) << "where it is faster than without";
  EXPECT_THAT(findings_of(scaling).back(), HasSubstr(", 20% less than without it"));
  const auto json = to_json(scaling);
  EXPECT_EQ(json["knee"], 4);
  EXPECT_EQ(json["points"][3]["cut"]["tokens_per_second"], 400 / 2.2 / 16);
  EXPECT_EQ(json["panels"][1]["y"], "tokens_per_second");
  EXPECT_EQ(json["panels"][0]["lines"][0]["points"].size(), 4U);
  EXPECT_THAT(to_string(scaling), HasSubstr("<- the knee"));
}

class StrongScaling : public testing_support::TrainFixture {};

TEST_F(StrongScaling, EndsWhereDataRanksHaveNoSequenceLeft) {
  Config config = this->config("llama", {"batch.global_size=2", "model.heads=2", "model.kv_heads=1", "model.layers=1"});
  config.run.memory_limit_bytes = int64_t{1} << 30;
  const Machine machine = machine_of(find_device("h100"));
  const Scaling scaling = strong_scaling(config, machine, {.world = 8, .runs = 6, .fewest_columns = 4});
  ASSERT_EQ(scaling.points.size(), 4U);
  EXPECT_TRUE(scaling.points[1].whole) << "a rank for each sequence";
  EXPECT_FALSE(scaling.points[3].whole) << "two sequences, two heads, one layer: no eight ranks without cutting sequences";
  ASSERT_TRUE(scaling.knee.has_value());
  ASSERT_TRUE(scaling.points[3].cut.has_value()) << to_string(scaling);
  EXPECT_GT(scaling.points[3].cut->choice.cp, 1);
  for (const auto& point : scaling.points) {
    if (point.whole) EXPECT_EQ(point.whole->choice.cp, 1);
    EXPECT_FALSE(point.cut && point.ranks < *scaling.knee);
  }
  config.run.memory_limit_bytes = 1000;
  EXPECT_THAT(refusal([&] { strong_scaling(config, machine, {.world = 2, .runs = 4, .fewest_columns = 4}); }),
              AllOf(HasSubstr("no layout of 1 to 2 ranks fits"), HasSubstr("--world")));
}

}  // namespace
}  // namespace tessera::plan
