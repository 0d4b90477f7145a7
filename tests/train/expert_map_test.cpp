#include "tessera/train/observers/expert_map.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/data/files.h"

namespace tessera {
namespace {

using data::Folder;
using data::slurp;
using ::testing::HasSubstr;
using ::testing::Not;

ExpertLoad load(int64_t layer, std::vector<double> share) { return {.layer = layer, .share = std::move(share)}; }

size_t count(const std::string& text, const std::string& what) {
  size_t found = 0;
  for (size_t at = text.find(what); at != std::string::npos; at = text.find(what, at + 1)) ++found;
  return found;
}

TEST(ExpertLoad, TheBusiestIsMeasuredByTheMean) {
  EXPECT_DOUBLE_EQ(load(0, {0.25, 0.25, 0.25, 0.25}).busiest(), 1);
  EXPECT_DOUBLE_EQ(load(0, {0.5, 0.5, 0, 0}).busiest(), 2);
  EXPECT_EQ(ExpertLoad{}.busiest(), 0);
}

TEST(ExpertHeat, HasACellForEachExpertAndStep) {
  ExpertHeat heat;
  EXPECT_TRUE(heat.empty());
  heat.add(1, {load(0, {0.5, 0.5}), load(2, {1, 0})});
  heat.add(2, {load(0, {0.5, 0.5}), load(2, {0.5, 0.5})});
  const std::string svg = heat.draw("a run").str();
  EXPECT_EQ(count(svg, ", expert "), 8U);
  EXPECT_THAT(svg, HasSubstr("layer 2, expert 0, steps 1 to 1: 2.00"));
  EXPECT_THAT(svg, HasSubstr("layer 2, expert 1, steps 1 to 1: 0.00"));
  EXPECT_THAT(svg, HasSubstr("#0000ff"));  // no load at all
  EXPECT_THAT(svg, Not(HasSubstr("layer 1")));
}

TEST(ExpertHeat, ALongRunIsDrawnInMeansOfSteps) {
  ExpertHeat heat;
  const auto steps = static_cast<int64_t>(4 * ExpertHeat::kMostColumns + 3);
  for (int64_t step = 1; step <= steps; ++step) heat.add(step, {load(0, {step % 2 == 0 ? 1.0 : 0.0, step % 2 == 0 ? 0.0 : 1.0})});
  const std::string svg = heat.draw("a run").str();
  EXPECT_LE(count(svg, "expert 0,"), ExpertHeat::kMostColumns);
  EXPECT_THAT(svg, HasSubstr("steps 1 to 8: 1.00"));
  EXPECT_THAT(svg, HasSubstr("step " + std::to_string(steps)));
}

TEST(ExpertMap, IsDrawnWhenTheRunEndsAndNotForDenseModels) {
  Folder folder;
  ExpertMap map;
  map.on_start({.name = "mixture", .log_dir = folder.path()});
  map.on_end({});
  EXPECT_FALSE(std::filesystem::exists(folder / "expert_load.svg"));
  map.after_step({.step = 1, .experts = {load(0, {0.5, 0.5})}});
  map.on_end({});
  EXPECT_THAT(slurp(folder / "expert_load.svg"), HasSubstr("mixture: experts"));
}

}  // namespace
}  // namespace tessera
