#include "tessera/plan/curves.h"

#include <algorithm>
#include <string>
#include <vector>

#include <gmock/gmock.h>

#include "tessera/core/error.h"
#include "tessera/plan/device.h"
#include "tessera/plan/dry_run.h"
#include "tests/train/fixture.h"

namespace tessera::plan {
namespace {

using testing::HasSubstr;

std::vector<double> heights_of(const Curves::Panel& panel, const std::string& name) {
  std::vector<double> heights;
  const auto line = std::ranges::find(panel.lines, name, &Curves::Line::name);
  if (line == panel.lines.end()) return heights;
  for (const auto& [x, y] : line->points) heights.push_back(y);
  return heights;
}

class CurvesTest : public testing_support::TrainFixture {
 protected:
  Machine machine = machine_of(find_device("h100"));
};

TEST_F(CurvesTest, MemoryFallsWithTheStageAndIsThatOfThePlan) {
  Config config = this->config("llama");
  config.run.memory_limit_bytes = 1000000;
  const Curves curves = make_curves(config, "memory", {.world = 4});
  ASSERT_EQ(curves.panels.size(), 1U);
  const auto none = heights_of(curves.panels[0], "DDP"), all = heights_of(curves.panels[0], "ZeRO 3 (FSDP)");
  ASSERT_EQ(none.size(), 3U) << "1, 2 and 4 ranks";
  ASSERT_EQ(all.size(), 3U);
  EXPECT_GT(none[2], all[2]);
  EXPECT_GT(all[1], all[2]);
  const Config same = this->config("llama", {"batch.global_size=" + std::to_string(4 * config.batch.micro_size), "zero.stage=3"});
  EXPECT_EQ(all[2], static_cast<double>(total_of(largest_class(dry_run(same, 4)).peak_bytes)));
  EXPECT_THAT(to_string(curves), HasSubstr("the device has"));
  EXPECT_THAT(svg_of(curves), testing::AllOf(HasSubstr("ZeRO 2"), HasSubstr("dashed"), HasSubstr(">ranks<"), HasSubstr(">peak memory<")));
}

TEST_F(CurvesTest, WeightsDoNotGrowWithTheBatchAndActivationsDo) {
  const Curves curves = make_curves(this->config("llama"), "traffic", {.world = 2});
  ASSERT_FALSE(curves.panels.empty());
  EXPECT_THAT(svg_of(curves), testing::AllOf(HasSubstr(">sequences<"), HasSubstr(">bytes sent<")));
  const auto weights = heights_of(curves.panels[0], "DDP: gradients"), activations = heights_of(curves.panels[0], "tensor parallel: activations");
  ASSERT_EQ(weights.size(), 4U);
  ASSERT_EQ(activations.size(), 4U);
  EXPECT_EQ(weights.front(), weights.back());
  EXPECT_GT(activations.back(), 6 * activations.front()) << "of eight times the sequences";
}

TEST_F(CurvesTest, LatencyBeginsWithOneRankAndBatchHasEveryWay) {
  const Curves latency = make_curves(this->config("llama"), "latency", {.world = 2, .machine = machine});
  const auto cut = heights_of(latency.panels.at(0), "tensor parallel"), staged = heights_of(latency.panels.at(0), "pipeline");
  ASSERT_EQ(cut.size(), 2U) << to_string(latency);
  ASSERT_EQ(staged.size(), 2U) << to_string(latency);
  EXPECT_EQ(cut[0], staged[0]) << "of one rank";
  EXPECT_NE(cut[1], staged[1]);
  const Curves batch = make_curves(this->config("llama"), "batch", {.world = 2, .machine = machine});
  for (const auto& line : batch.panels.at(0).lines) EXPECT_GT(line.points.back().second, line.points.front().second) << line.name;
  const auto firsts = [&](const std::string& name) {
    const auto& lines = batch.panels.at(0).lines;
    return std::ranges::find(lines, name, &Curves::Line::name)->points.front().first;
  };
  EXPECT_EQ(firsts("DDP"), 2) << "which no fewer sequences are trained on";
  EXPECT_EQ(firsts("pipeline"), 1);
  const auto json = to_json(batch);
  EXPECT_EQ(json["curve"], "batch");
  EXPECT_EQ(json["panels"][0]["y"], "seconds");
  EXPECT_THAT(svg_of(batch), HasSubstr(">time of a step<"));
}

TEST_F(CurvesTest, RefusesWhatIsNoCurve) {
  const auto refusal = [&](const std::string& name, const CurveOptions& options) -> std::string {
    try {
      make_curves(this->config("llama"), name, options);
    } catch (const ConfigError& error) {
      return error.what();
    }
    return "none";
  };
  EXPECT_THAT(refusal("memroy", {}), HasSubstr("choose one of memory, latency, batch, traffic"));
  EXPECT_THAT(refusal("latency", {}), HasSubstr("add --device NAME"));
  EXPECT_THAT(refusal("memory", {.world = 1}), HasSubstr("--world = 1"));
}

}  // namespace
}  // namespace tessera::plan
