#include "tessera/precision/policy.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/linear.h>

#include "tessera/core/error.h"
#include "tessera/nn/linear.h"

namespace tessera::precision {
namespace {

struct MixedImpl : nn::Module {
  MixedImpl() : ours(3, 2), theirs(2, 1) {
    register_module("ours", ours);
    register_module("theirs", theirs);
  }
  nn::Linear ours;
  torch::nn::Linear theirs;
};

PrecisionConfig config_of(const std::string& params, const std::string& compute) {
  PrecisionConfig config;
  config.params = params;
  config.compute = compute;
  return config;
}

TEST(Policy, SetsTheComputeTypeOfInterceptableModulesAndKeepsWeights) {
  MixedImpl model;
  precision::apply(model, policy_from(config_of("fp32", "bf16")));
  EXPECT_EQ(model.compute_dtype(), at::kBFloat16);
  EXPECT_EQ(model.ours->compute_dtype(), at::kBFloat16);
  for (const auto& parameter : model.parameters()) EXPECT_EQ(parameter.scalar_type(), at::kFloat);
  precision::apply(model, policy_from(config_of("fp32", "fp32")));
  EXPECT_EQ(model.ours->compute_dtype(), at::kFloat);
}

TEST(Policy, RefusesWhatIsNotBuilt) {
  EXPECT_THAT([] { policy_from(config_of("fp32", "fp8")); }, testing::ThrowsMessage<ConfigError>(testing::HasSubstr("precision.compute = fp8")));
  EXPECT_THAT([] { policy_from(config_of("bf16", "bf16")); }, testing::ThrowsMessage<ConfigError>(testing::HasSubstr("precision.params = bf16")));
}

}  // namespace
}  // namespace tessera::precision
