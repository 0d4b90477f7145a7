#include "tessera/precision/loss_scale.h"

#include <cmath>
#include <limits>

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tessera/core/error.h"

namespace tessera::precision {
namespace {

using Decision = LossScale::Decision;

LossScale make(const std::string& loss_scale, int64_t growth_steps = 3, int64_t max_skips = 4) {
  PrecisionConfig config;
  config.loss_scale = loss_scale;
  config.growth_steps = growth_steps;
  config.max_skips = max_skips;
  return LossScale(config);
}

TEST(LossScale, NoneScalesNothingAndStopsAtOnce) {
  auto none = make("none");
  EXPECT_FALSE(none.enabled());
  EXPECT_EQ(none.value(), 1);
  EXPECT_EQ(none.after_backward(true), Decision::Update);
  EXPECT_EQ(none.after_backward(false), Decision::Stop);
  EXPECT_EQ(none.skipped(), 0);
}

TEST(LossScale, DynamicHalvesOnASkipAndDoublesAfterFiniteStepsInARow) {
  auto scale = make("dynamic");
  EXPECT_EQ(scale.value(), 65536);
  EXPECT_EQ(scale.after_backward(false), Decision::Skip);
  EXPECT_EQ(scale.value(), 32768);
  EXPECT_EQ(scale.after_backward(true), Decision::Update);
  EXPECT_EQ(scale.after_backward(true), Decision::Update);
  EXPECT_EQ(scale.after_backward(false), Decision::Skip) << "two finite steps do not yet make three";
  EXPECT_EQ(scale.value(), 16384);
  for (int i = 0; i < 3; ++i) EXPECT_EQ(scale.after_backward(true), Decision::Update);
  EXPECT_EQ(scale.value(), 32768);
  for (int i = 0; i < 300; ++i) scale.after_backward(true);
  EXPECT_EQ(scale.value(), 1 << 24) << "and no further";
  EXPECT_EQ(scale.skipped(), 2);
}

TEST(LossScale, StaticNeverMovesAndBothStopAfterSkipsInARow) {
  for (const std::string mode : {"1000", "dynamic"}) {
    auto scale = make(mode);
    const double first = scale.value();
    for (int i = 0; i < 3; ++i) EXPECT_EQ(scale.after_backward(false), Decision::Skip);
    EXPECT_EQ(scale.after_backward(true), Decision::Update) << "which begins the count anew";
    for (int i = 0; i < 3; ++i) EXPECT_EQ(scale.after_backward(false), Decision::Skip);
    EXPECT_EQ(scale.after_backward(false), Decision::Stop);
    EXPECT_EQ(scale.value(), mode == "dynamic" ? first / 64 : 1000);
    EXPECT_EQ(scale.skipped(), 7);
  }
}

TEST(LossScale, UnscalesInPlaceAndHalfInFp32) {
  std::vector<nn::NamedParameter> parameters;
  for (const auto dtype : {at::kFloat, at::kHalf, at::kFloat}) parameters.push_back({"p" + std::to_string(parameters.size()), at::zeros({3}, dtype), {}});
  parameters[0].tensor.mutable_grad() = at::full({3}, 65536.0);
  parameters[1].tensor.mutable_grad() = at::full({3}, 6e-8, at::kHalf);  // fp16's smallest number: divided in fp16 it would vanish
  const at::Tensor before = parameters[0].tensor.grad();
  make("dynamic").unscale(parameters);
  EXPECT_TRUE(parameters[0].tensor.grad().is_same(before));
  EXPECT_EQ(parameters[0].tensor.grad()[0].item<float>(), 1);
  EXPECT_EQ(parameters[1].tensor.grad().scalar_type(), at::kFloat);
  EXPECT_EQ(parameters[1].tensor.grad()[0].item<float>(), std::ldexp(1.0f, -24 - 16));
  EXPECT_FALSE(parameters[2].tensor.grad().defined());
}

TEST(LossScale, GoesOnFromItsStateBitForBit) {
  auto first = make("dynamic"), second = make("dynamic");
  for (const bool finite : {true, false, true, true}) first.after_backward(finite);
  second.restore(nlohmann::json::parse(first.state().dump()), "ckpt");
  for (const bool finite : {true, true, true, false, false, true, true, true}) {
    EXPECT_EQ(first.after_backward(finite), second.after_backward(finite));
    EXPECT_EQ(first.value(), second.value());
  }
  EXPECT_EQ(first.state(), second.state());
}

TEST(LossScale, SkipsInARowGoOnCounting) {
  for (const std::string mode : {"dynamic", "1000"}) {
    auto first = make(mode);
    for (int i = 0; i < 3; ++i) EXPECT_EQ(first.after_backward(false), Decision::Skip);
    auto second = make(mode);
    second.restore(first.state(), "ckpt");
    EXPECT_EQ(second.after_backward(false), Decision::Stop) << "the fourth, although another process skipped the first three";
  }
}

TEST(LossScale, LostLossesInARowGoOnCounting) {
  auto first = make("dynamic");
  first.after_backward(false, /*lost=*/true);
  EXPECT_EQ(first.lost_in_a_row(), 1);
  auto second = make("dynamic"), older = make("dynamic");
  second.restore(nlohmann::json::parse(first.state().dump()), "ckpt");
  second.after_backward(false, /*lost=*/true);
  EXPECT_EQ(second.lost_in_a_row(), 2) << "the second, although another process lost the first";
  second.after_backward(false);
  EXPECT_EQ(second.lost_in_a_row(), 0);
  auto state = first.state();
  state.erase("lost_in_a_row");
  older.restore(state, "ckpt");
  EXPECT_EQ(older.lost_in_a_row(), 0);
}

TEST(LossScale, ANumberInTheConfigurationWins) {
  auto before = make("1000"), after = make("256");
  for (int i = 0; i < 3; ++i) before.after_backward(false);
  after.restore(before.state(), "ckpt");
  EXPECT_EQ(after.value(), 256);
  EXPECT_EQ(after.skipped(), 3);
  EXPECT_EQ(after.after_backward(false), Decision::Skip) << "at this scale nothing was skipped yet";
}

TEST(LossScale, AnotherKindTakesOverTheSkippedStepsAlone) {
  auto before = make("dynamic");
  before.after_backward(false);
  for (const std::string mode : {"none", "256"}) {
    auto after = make(mode);
    const double value = after.value();
    after.restore(before.state(), "ckpt");
    EXPECT_EQ(after.value(), value);
    EXPECT_EQ(after.skipped(), 1);
  }
  EXPECT_THAT([&] { make("dynamc"); },
              ::testing::ThrowsMessage<ConfigError>(::testing::HasSubstr("precision.loss_scale = dynamc: expected none, dynamic, or a positive number")));
  for (const auto& damage : std::vector<nlohmann::json>{{{"value", "x"}}, {{"skipped", 1e300}}, {{"skipped", -1}}, {{"in_a_row", nullptr}}, {{"value", 0}}}) {
    nlohmann::json saved = make("dynamic").state();
    saved.update(damage);
    EXPECT_THAT([&] { make("dynamic").restore(saved, "here"); }, ::testing::ThrowsMessage<ConfigError>(::testing::HasSubstr("here: progress.loss_scale")))
        << saved;
  }
}

}  // namespace
}  // namespace tessera::precision
