#include "tessera/plan/presets.h"

#include <map>
#include <string>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tessera/config/config.h"
#include "tessera/models/flops.h"
#include "tests/refusal.h"

namespace tessera {
namespace {

TEST(Presets, HaveThePublishedNumberOfParameters) {
  const std::map<std::string, double> published{{"7b", 6.74e9},
                                                {"30b", 32.5e9},
                                                {"llama3-8b", 8.03e9},
                                                {"llama3-70b", 70.6e9},
                                                {"mistral-7b", 7.24e9},
                                                {"llama3-405b", 405.9e9},
                                                {"mistral-large-123b", 122.6e9},
                                                {"gpt3-175b", 174.6e9},
                                                {"nemotron4-340b", 341e9},
                                                {"mixtral-8x7b", 46.7e9}};
  for (const auto& name : plan::preset_names()) {
    auto found = plan::preset(name, {});
    ASSERT_TRUE(found);
    resolve(found->config);
    EXPECT_NEAR(static_cast<double>(num_parameters(found->config.model)), published.at(name), 0.01 * published.at(name)) << name;
  }
  Config mixtral = plan::preset("mixtral-8x7b", {}).value().config;
  resolve(mixtral);
  EXPECT_NEAR(static_cast<double>(num_active_parameters(mixtral.model)), 12.9e9, 0.1e9);
  EXPECT_FALSE(plan::preset("9b", {}));
}

TEST(Presets, APlainCountIsAShapeOfAsMany) {
  for (const std::string count : {"1e7", "125000000", "7e9", "405e9"}) {
    auto found = plan::preset(count, {"batch.micro_size=2"});
    ASSERT_TRUE(found) << count;
    resolve(found->config);
    validate(found->config, 1, Purpose::Plan);
    EXPECT_EQ(found->parameters, std::stod(count));
    EXPECT_NEAR(static_cast<double>(num_parameters(found->config.model)), found->parameters, 0.05 * found->parameters) << count;
    EXPECT_EQ(found->config.batch.micro_size, 2);
  }
  EXPECT_FALSE(plan::preset("7e9x", {}));
  EXPECT_THAT(testing_support::refusal([] { (void)plan::preset("1e3", {}); }), ::testing::HasSubstr("1000 parameters"));
  EXPECT_THAT(testing_support::refusal([] { (void)plan::preset("9999999", {}); }),
              ::testing::HasSubstr("9999999 parameters: a shape is made for counts from 1e7"));
}

}  // namespace
}  // namespace tessera
