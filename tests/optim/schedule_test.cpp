#include "tessera/optim/schedule.h"

#include <gtest/gtest.h>

#include "tessera/core/error.h"

namespace tessera::optim {
namespace {

OptimConfig schedule_config(const std::string& schedule, int64_t warmup_steps, double min_lr = 0) {
  OptimConfig config;
  config.lr = 2;
  config.min_lr = min_lr;
  config.schedule = schedule;
  config.warmup_steps = warmup_steps;
  return config;
}

TEST(LearningRate, WarmsUpFromAboveZero) {
  for (const std::string schedule : {"constant", "linear", "cosine"}) {
    const LearningRate rate(schedule_config(schedule, 4), 10);
    EXPECT_DOUBLE_EQ(rate.at(1), 0.5) << schedule;
    EXPECT_DOUBLE_EQ(rate.at(2), 1.0) << schedule;
    EXPECT_DOUBLE_EQ(rate.at(4), 2.0) << schedule;
    EXPECT_DOUBLE_EQ(rate.at(5), 2.0) << schedule;
  }
}

TEST(LearningRate, StartsAtLrWithoutWarmUp) {
  for (const std::string schedule : {"constant", "linear", "cosine"}) EXPECT_DOUBLE_EQ(LearningRate(schedule_config(schedule, 0), 10).at(1), 2.0);
}

TEST(LearningRate, ConstantStays) { EXPECT_EQ(LearningRate(schedule_config("constant", 2), 5).at(1000), 2.0); }

TEST(LearningRate, LinearFallsByEqualSteps) {
  const LearningRate rate(schedule_config("linear", 2, 1.0), 6);
  EXPECT_DOUBLE_EQ(rate.at(3), 2.0);
  EXPECT_DOUBLE_EQ(rate.at(4), 1.75);
  EXPECT_DOUBLE_EQ(rate.at(6), 1.25);
  EXPECT_DOUBLE_EQ(rate.at(7), 1.0);
}

TEST(LearningRate, CosineIsHalfWayInTheMiddle) {
  const LearningRate rate(schedule_config("cosine", 0, 1.0), 8);
  EXPECT_DOUBLE_EQ(rate.at(5), 1.5);
  EXPECT_NEAR(rate.at(3), 1.0 + (1 + std::sqrt(0.5)) / 2, 1e-12);
  EXPECT_DOUBLE_EQ(rate.at(9), 1.0);
}

TEST(LearningRate, IsNeverZeroWithinTheRunAndNeverBelowMinLrBeyondIt) {
  for (const std::string schedule : {"linear", "cosine"}) {
    for (const int64_t warmup : {0, 1, 3, 20}) {
      const LearningRate rate(schedule_config(schedule, warmup), 20);
      for (int64_t step = 1; step <= 20; ++step) EXPECT_GT(rate.at(step), 0) << schedule << " " << warmup << " " << step;
      EXPECT_GE(rate.at(1000), 0);
    }
    EXPECT_DOUBLE_EQ(LearningRate(schedule_config(schedule, 0), 1).at(1), 2.0);
  }
}

TEST(LearningRate, RefusesAnUnknownSchedule) { EXPECT_THROW(LearningRate(schedule_config("step", 0), 1), ConfigError); }

}  // namespace
}  // namespace tessera::optim
