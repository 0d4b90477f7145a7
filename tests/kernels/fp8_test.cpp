#include "tessera/kernels/fp8.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tessera/core/error.h"
#include "tessera/core/rng.h"
#include "tests/test_device.h"

namespace tessera::kernels {
namespace {

at::Tensor normals(at::IntArrayRef sizes, const std::string& stream) {
  return testing_support::floats_by(sizes, [&](float* out, int64_t n) { CounterRng(2, stream).fill_normal(out, 0, n, 0, 1); });
}

/// Root mean square of the difference, relative to that of what is wanted.
double error_of(const at::Tensor& got, const at::Tensor& want) { return ((got.to(at::kFloat) - want).norm() / want.norm()).item<double>(); }

// Rounding to k bits behind the point errs by 2^-k / sqrt(12) of the power of two below, so 2.6% (e4m3) and 5.2% (e5m2) of a number on the average, and a
// product has two factors: 3.7% and 5.8%. The rest is the luck of small matrices.
constexpr double kForward = 0.045, kBackward = 0.07;

class Fp8 : public ::testing::TestWithParam<Fp8Scaling> {};

TEST_P(Fp8, ProductsAndGradientsAreThoseOfFp32WithinTheFormat) {
  for (const auto& [tokens, in, out] : std::vector<std::tuple<int64_t, int64_t, int64_t>>{{64, 128, 96}, {17, 24, 13}, {1, 1, 1}, {35, 33, 1}}) {
    std::map<bool, std::vector<at::Tensor>> results;
    for (const bool fp8 : {false, true}) {
      const at::Tensor x = normals({tokens, in}, "x").requires_grad_(true), weight = normals({out, in}, "w").requires_grad_(true);
      const at::Tensor bias = normals({out}, "b").requires_grad_(true);
      const at::Tensor y = fp8 ? fp8_linear(x, weight, bias, at::kFloat, GetParam()) : at::linear(x, weight, bias);
      y.backward(normals(y.sizes(), "dy"));
      results[fp8] = {y.detach(), x.grad(), weight.grad(), bias.grad()};
    }
    EXPECT_LE(error_of(results[true][0], results[false][0]), kForward) << tokens << " " << in << " " << out;
    EXPECT_LE(error_of(results[true][1], results[false][1]), kBackward);
    EXPECT_LE(error_of(results[true][2], results[false][2]), kBackward);
    EXPECT_LE(error_of(results[true][3], results[false][3]), 1e-6) << "a bias is no product";
  }
}

TEST_P(Fp8, KeepsShapesDtypesAndEmptyBatches) {
  const at::Tensor weight = normals({6, 4}, "w").to(at::kBFloat16).requires_grad_(true);
  for (const std::vector<int64_t>& shape : {std::vector<int64_t>{2, 3, 4}, {0, 4}, {4}}) {
    const at::Tensor x = normals(shape, "x").to(at::kBFloat16).requires_grad_(true);
    const at::Tensor y = fp8_linear(x, weight, std::nullopt, at::kBFloat16, GetParam());
    auto expected = shape;
    expected.back() = 6;
    EXPECT_EQ(y.sizes(), at::IntArrayRef(expected));
    EXPECT_EQ(y.scalar_type(), at::kBFloat16);
    y.sum().backward();
    EXPECT_EQ(x.grad().scalar_type(), at::kBFloat16);
    EXPECT_EQ(x.grad().sizes(), x.sizes());
  }
  EXPECT_EQ(weight.grad().scalar_type(), at::kBFloat16);
}

TEST_P(Fp8, ScalesToTheFormatsLargestNumber) {
  const at::Tensor x = normals({5, 8}, "x") * 1e-7;
  for (const auto& [dtype, largest] : std::map<at::ScalarType, double>{{at::kFloat8_e4m3fn, 448}, {at::kFloat8_e5m2, 57344}}) {
    const Fp8Matrix matrix = to_fp8(x, dtype, GetParam());
    EXPECT_EQ(matrix.values.to(at::kFloat).abs().max().item<double>(), largest);
    EXPECT_LE(error_of(matrix.values.to(at::kFloat) * matrix.scale, x), 0.1);
  }
  const Fp8Matrix zeros = to_fp8(at::zeros({2, 3}), at::kFloat8_e4m3fn, GetParam());
  EXPECT_EQ(zeros.values.to(at::kFloat).abs().max().item<double>(), 0);
  EXPECT_TRUE(at::equal(zeros.scale, at::ones_like(zeros.scale)));
}

TEST_P(Fp8, NumbersTooSmallToScaleBecomeZero) {
  for (const double largest : {1e-38, 9.2e-41, 1e-40, 3e-40, 1e-44}) {
    for (const auto dtype : {at::kFloat8_e4m3fn, at::kFloat8_e5m2}) {
      const auto [values, scale] = to_fp8(at::full({2, 3}, largest), dtype, GetParam());
      EXPECT_LE(values.to(at::kFloat).mul(scale).sub(largest).abs().max().item<double>(), 1e-38) << largest;
    }
  }
}

TEST_P(Fp8, WhatIsNotFiniteStaysSo) {
  at::Tensor x = normals({4, 8}, "x");
  x[1][2] = std::numeric_limits<float>::quiet_NaN();
  const at::Tensor y = fp8_linear(x, normals({3, 8}, "w"), std::nullopt, at::kFloat, GetParam());
  EXPECT_TRUE(at::isnan(y[1]).all().item<bool>());
}

INSTANTIATE_TEST_SUITE_P(Scales, Fp8, ::testing::Values(Fp8Scaling::Tensor, Fp8Scaling::Row),
                         [](const auto& info) { return info.param == Fp8Scaling::Row ? "Row" : "Tensor"; });

TEST(Fp8Scales, AnOutlierSpoilsItsOwnRowOnly) {
  at::Tensor x = normals({8, 32}, "x");
  x[3][5] = 1e6;
  const at::Tensor weight = normals({16, 32}, "w"), want = at::linear(x, weight);
  const auto others = [](const at::Tensor& y) { return at::cat({y.narrow(0, 0, 3), y.narrow(0, 4, 4)}); };
  const auto error = [&](Fp8Scaling scaling) { return error_of(others(fp8_linear(x, weight, std::nullopt, at::kFloat, scaling)), others(want)); };
  EXPECT_LE(error(Fp8Scaling::Row), kForward);
  EXPECT_GT(error(Fp8Scaling::Tensor), 0.5);
}

TEST(Fp8Scales, RefusesShapesThatDoNotFit) {
  EXPECT_THAT([] { fp8_linear(normals({2, 3}, "x"), normals({2, 4}, "w"), std::nullopt, at::kFloat); },
              ::testing::ThrowsMessage<ConfigError>(::testing::HasSubstr("one number of features")));
}

}  // namespace
}  // namespace tessera::kernels
