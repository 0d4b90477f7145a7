// fp16 where the processor has no arithmetic for it: operands and results are rounded to fp16, and what lies between is the very fp32 operator.
#include "tessera/kernels/half.h"

#include <cmath>

#include "tessera/kernels/attention.h"
#include "tessera/kernels/cross_entropy.h"
#include "tessera/kernels/linear_cross_entropy.h"
#include "tessera/kernels/rope.h"
#include "tessera/kernels/swiglu.h"
#include "tests/kernels/support.h"

namespace tessera::kernels {
namespace {

using namespace tessera::testing_support;

/// Holds `f` on fp16 operands to `f` on the same numbers in fp32, with the result and each gradient rounded: bit for bit. Magnitudes up to 4: far from both
/// ends.
void expect_rounded_only(const Operator& f, const std::vector<at::Tensor>& inputs, at::ScalarType result_dtype = at::kHalf) {
  std::vector<at::Tensor> rounded, widened;
  for (const auto& input : inputs) {
    rounded.push_back(input.is_floating_point() ? input.to(at::kHalf) : input);
    widened.push_back(input.is_floating_point() ? rounded_to_half(input) : input);
  }
  const at::Tensor cotangent = rounded_to_half(random(f(widened).sizes(), at::kFloat, 9));
  const auto half = evaluate(f, rounded, cotangent), wide = evaluate(f, widened, cotangent);
  EXPECT_EQ(half.result.scalar_type(), result_dtype);
  EXPECT_TRUE(at::equal(half.result, wide.result.to(result_dtype)));
  ASSERT_EQ(half.gradients.size(), wide.gradients.size());
  for (size_t i = 0; i < half.gradients.size(); ++i) {
    EXPECT_EQ(half.gradients[i].scalar_type(), at::kHalf);
    EXPECT_TRUE(at::equal(half.gradients[i], wide.gradients[i].to(at::kHalf))) << "gradient " << i;
  }
}

TEST(Half, SwigluRoundsOperandsAndResultsAlone) {
  for (const int64_t n : {1, 7, 64}) expect_rounded_only([](const auto& in) { return swiglu(in[0], in[1]); }, {random({3, n}), random({3, n}, at::kFloat, 2)});
}

TEST(Half, AttentionRoundsOperandsAndResultsAlone) {
  for (const int64_t length : {1, 5, 33}) {
    const std::vector<at::Tensor> in{random({2, 4, length, 8}), random({2, 2, length, 8}, at::kFloat, 2), random({2, 2, length, 8}, at::kFloat, 3)};
    expect_rounded_only([](const auto& x) { return flash_attention(x[0], x[1], x[2], /*causal=*/true); }, in);
  }
}

TEST(Half, RotationKeepsItsTablesInFp32) {
  const at::Tensor angles = random({5, 4}), cos = angles.cos(), sin = angles.sin();
  expect_rounded_only([&](const auto& in) { return rope(in[0], cos, sin); }, {random({2, 5, 3, 8})});
}

TEST(Half, ALossOfLogitsIsFp32) {
  const at::Tensor labels = at::tensor({0, 4, -100}, at::kLong);
  expect_rounded_only([&](const auto& in) { return cross_entropy_sum(in[0], labels); }, {random({3, 5})}, at::kFloat);
}

TEST(Half, LinearAndLossRoundTheOperandsOfTheProductAlone) {
  const at::Tensor labels = at::tensor({0, 4, -100}, at::kLong), hidden = random({3, 8}), weight = random({5, 8}, at::kFloat, 2);
  const LinearCrossEntropyOptions half{.compute_dtype = at::kHalf}, wide{.compute_dtype = at::kFloat};
  const auto got = evaluate([&](const auto& in) { return linear_cross_entropy(in[0], in[1], labels, half); }, {hidden, weight}, at::ones({}));
  const auto want = evaluate([&](const auto& in) { return linear_cross_entropy(in[0], in[1], labels, wide); },
                             {rounded_to_half(hidden), rounded_to_half(weight)}, at::ones({}));
  EXPECT_TRUE(at::equal(got.result, want.result));
  for (const int i : {0, 1}) {
    EXPECT_EQ(got.gradients[i].scalar_type(), at::kFloat) << "that of fp32 operands";
    EXPECT_TRUE(at::equal(got.gradients[i], rounded_to_half(want.gradients[i]))) << "which crossed the same rounding";
  }
}

/// As a layer that computes in fp16 gives them to a head that does not.
TEST(Half, HiddenStatesMeetALossOfMoreBits) {
  const at::Tensor labels = at::tensor({0, 4, -100}, at::kLong), hidden = random({3, 8}), weight = random({5, 8}, at::kFloat, 2);
  for (const at::ScalarType compute : {at::kFloat, at::kBFloat16}) {
    const auto loss = [&](const auto& in) { return linear_cross_entropy(in[0], in[1], labels, {.compute_dtype = compute}); };
    const auto got = evaluate(loss, {hidden.to(at::kHalf), weight}, at::ones({})), want = evaluate(loss, {rounded_to_half(hidden), weight}, at::ones({}));
    EXPECT_TRUE(at::equal(got.result, want.result));
    EXPECT_TRUE(at::equal(got.gradients[0], want.gradients[0].to(at::kHalf)));
    EXPECT_TRUE(at::equal(got.gradients[1], want.gradients[1]));
  }
}

TEST(Half, OverflowsAndVanishesAsOnADevice) {
  const at::Tensor large = at::full({1, 1}, 60000.0, at::kHalf), small = at::full({1, 1}, 1e-4, at::kHalf);
  EXPECT_TRUE(std::isinf(swiglu(large, large).item<float>()));
  EXPECT_EQ(swiglu(small, small).item<float>(), 0) << "5e-9 is below half of fp16's smallest number";
}

}  // namespace
}  // namespace tessera::kernels
