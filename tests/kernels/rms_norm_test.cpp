#include "tessera/kernels/rms_norm.h"

#include "tessera/core/error.h"
#include "tessera/kernels/choice.h"
#include "tessera/kernels/reference.h"
#include "tests/kernels/support.h"

namespace tessera::kernels {
namespace {

using namespace tessera::testing_support;
constexpr double kEps = 1e-5;

class RmsNorm : public ::testing::TestWithParam<std::tuple<at::ScalarType, at::ScalarType, at::ScalarType, std::vector<int64_t>>> {};

TEST_P(RmsNorm, EqualsTheReferenceInDoublePrecision) {
  const auto& [x_dtype, weight_dtype, out_dtype, shape] = GetParam();
  const auto fused = [&, out = out_dtype](const std::vector<at::Tensor>& in) { return rms_norm(in[0], in[1], kEps, out); };
  const auto reference = [](const std::vector<at::Tensor>& in) { return reference::rms_norm(in[0], in[1], kEps); };
  const double bound = std::max({tolerance(x_dtype), tolerance(weight_dtype), tolerance(out_dtype)});
  expect_same(fused, reference, {random(shape, x_dtype, 1), random({shape.back()}, weight_dtype, 2)}, bound);
}

const auto dtypes = ::testing::Values(at::kFloat, at::kBFloat16);
INSTANTIATE_TEST_SUITE_P(Shapes, RmsNorm,
                         ::testing::Combine(dtypes, dtypes, dtypes,
                                            ::testing::Values(std::vector<int64_t>{1, 2}, std::vector<int64_t>{1, 257}, std::vector<int64_t>{65, 3},
                                                              std::vector<int64_t>{2, 67, 64}, std::vector<int64_t>{48}, std::vector<int64_t>{0, 5})));

TEST(RmsNorm, OneFeatureIsItsSign) {
  // The gradient is 0 but for eps: the two terms of dx cancel, so the bound is absolute.
  const auto e =
      evaluate([](const auto& in) { return rms_norm(in[0], in[1], kEps); }, {at::tensor({-3.0f, 2.0f}).view({2, 1}), at::full({1}, 0.5)}, at::ones({2, 1}));
  expect_close(e.result, at::tensor({-0.5f, 0.5f}).view({2, 1}), 2e-6, "result");
  EXPECT_LE(e.gradients[0].abs().max().item().toDouble(), 1e-6);
}

TEST(RmsNorm, TakesAViewWithStrides) {
  const at::Tensor x = random({6, 10}).t(), weight = random({6}, at::kFloat, 2);
  expect_close(rms_norm(x, weight, kEps), reference::rms_norm(x, weight, kEps), 1e-6, "transposed");
}

TEST(RmsNorm, BitsDoNotDependOnThreads) {
  const at::Tensor x = random({1000, 96}), weight = random({96}, at::kFloat, 2), cotangent = random({1000, 96}, at::kFloat, 3);
  expect_thread_independent([&] {
    const auto e = evaluate([](const auto& in) { return rms_norm(in[0], in[1], kEps); }, {x, weight}, cotangent);
    return std::vector<at::Tensor>{e.result, e.gradients[0], e.gradients[1]};
  });
}

TEST(RmsNorm, ReferenceIsChosenPerThreadAndOnlyWhileTheGuardLives) {
  EXPECT_EQ(kernel_choices(), KernelChoices());
  const at::Tensor x = random({4, 8}, at::kDouble), weight = random({8}, at::kDouble, 2);
  {
    const KernelChoiceGuard guard(KernelChoice::Reference);
    EXPECT_EQ(rms_norm(x, weight, kEps).scalar_type(), at::kDouble);
  }
  EXPECT_EQ(kernel_choices(), KernelChoices());
  EXPECT_THAT(message_of<ConfigError>([&] { rms_norm(x, weight, kEps); }), ::testing::HasSubstr("run.kernels = \"reference\""));
}

TEST(RmsNorm, RefusesAWeightOfAnotherSize) {
  EXPECT_THAT(message_of<ConfigError>([] { rms_norm(random({4, 8}), random({7}), kEps); }), ::testing::HasSubstr("one entry per feature"));
}

}  // namespace
}  // namespace tessera::kernels
