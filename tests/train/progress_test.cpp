#include "tessera/train/progress.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tessera/comm/algorithms/choice.h"
#include "tessera/core/error.h"

namespace tessera {
namespace {

using ::testing::HasSubstr;

Config config_with(const std::string& algorithm, const std::string& table = "") {
  Config config;
  config.comm.backend = "gloo";
  config.comm.algorithm = algorithm;
  config.comm.table = table;
  return config;
}

// The progress of a run on two data ranks.
nlohmann::json saved_with(const comm::WorldOptions& options) { return progress_json(Config{}, {}, {}, comm::recorded_choice(options), 2); }

const comm::TableRow kProgressRow{.op = "all_reduce", .backend = "gloo", .algorithm = "ring", .bytes = 1024, .ranks = 2, .time_us = 3};

TEST(Progress, TheChoiceOfAlgorithmsOutlivesTheRun) {
  std::vector<std::string> remarks;
  const auto options = world_options_of(config_with("auto"), 2, saved_with({.rows = {kProgressRow}}), "step-4", remarks);
  EXPECT_EQ(options.rows, std::vector<comm::TableRow>{kProgressRow});
  EXPECT_EQ(world_options_of(config_with("auto"), 2, saved_with({.algorithm = "ring"}), "step-4", remarks).algorithm, "ring");
  EXPECT_TRUE(remarks.empty());
  // The backend and all else stay the configuration's.
  EXPECT_EQ(options.backend, "gloo");
}

TEST(Progress, AnotherLayoutChoosesAnew) {
  std::vector<std::string> remarks;
  const auto options = world_options_of(config_with("auto"), 3, saved_with({.algorithm = "ring", .rows = {}}), "step-4", remarks);
  EXPECT_EQ(options.algorithm, "auto");
  EXPECT_EQ(world_options_of(config_with("ring"), 3, saved_with({}), "step-4", remarks).algorithm, "ring");
  EXPECT_TRUE(remarks.empty());
}

TEST(Progress, AnExplicitAlgorithmWinsAndIsSaid) {
  std::vector<std::string> remarks;
  EXPECT_EQ(world_options_of(config_with("halving_doubling"), 2, saved_with({.algorithm = "ring"}), "step-4", remarks).algorithm, "halving_doubling");
  ASSERT_EQ(remarks.size(), 1U);
  EXPECT_THAT(remarks[0], HasSubstr("comm.algorithm = halving_doubling instead of ring as in step-4: sums are added in another order"));
  EXPECT_EQ(world_options_of(config_with("ring"), 2, saved_with({.algorithm = "ring"}), "step-4", remarks).algorithm, "ring");
  EXPECT_EQ(remarks.size(), 1U);
}

TEST(Progress, ARunWithoutAdaptersTrainedTheWholeModel) {
  Config adapted, before;
  adapted.lora.modules = "layers.*";
  adapted.lora.trained = {"norm.weight"};
  const auto beside = [&](const nlohmann::json& more = {}) {
    auto progress = progress_json(before, {}, {}, {}, 1);
    if (!more.is_null()) progress["lora_trained"] = more;
    return trained_beside_adapters(adapted, progress, "step-4");
  };
  EXPECT_THAT(beside(), ::testing::ElementsAre("norm.weight", "**"));
  before.lora.modules = "layers.*";
  EXPECT_THAT(beside(), ::testing::ElementsAre("norm.weight"));
  EXPECT_THAT(beside(nlohmann::json::array({"**"})), ::testing::ElementsAre("norm.weight", "**")) << "the run before that one";
}

TEST(Progress, OlderAndDamagedCheckpoints) {
  std::vector<std::string> remarks;
  auto progress = saved_with({.algorithm = "ring"});
  progress["comm"]["rows"] = 3;
  try {
    world_options_of(config_with("auto"), 2, progress, "step-4", remarks);
    FAIL() << "was taken";
  } catch (const ConfigError& error) {
    EXPECT_THAT(error.what(), HasSubstr("step-4: progress.comm in manifest.json cannot be read"));
  }
  progress.erase("comm");
  EXPECT_EQ(world_options_of(config_with("auto"), 2, progress, "step-4", remarks).algorithm, "auto");
  EXPECT_EQ(world_options_of(config_with("ring"), 2, nlohmann::json(), "", remarks).algorithm, "ring");
}

TEST(Progress, AProgramsOwnIsNoConfiguration) {
  const nlohmann::json own[] = {nlohmann::json(), {{"epoch", 3}}, {{"config", {{"lr", 0.1}}}}};
  for (const auto& progress : own) {
    EXPECT_FALSE(config_if_any(progress).has_value());
    EXPECT_THAT([&] { config_of(progress, "step-4"); }, ::testing::ThrowsMessage<ConfigError>(HasSubstr("step-4: was saved by a program of its own")));
  }
  const nlohmann::json text{{"config", "a name"}};
  EXPECT_FALSE(config_if_any(text).has_value());
  EXPECT_EQ(config_if_any(progress_json(Config{}, {}, {}, {}, 1)).value(), Config{});
}

}  // namespace
}  // namespace tessera
