#include "tessera/kernels/widen.h"

#include <ATen/ops/equal.h>
#include <ATen/ops/ones.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include "tessera/kernels/linear_cross_entropy.h"

namespace tessera::kernels {
namespace {

constexpr double kNotInBf16 = 1 + 1.0 / 512;  // which bf16 rounds to 1

at::Tensor narrow_leaf(std::optional<at::ScalarType> grad_dtype) {
  const at::Tensor weight = at::ones({3}, at::kBFloat16).requires_grad_(true);
  weight.set_grad_dtype(grad_dtype);
  return weight;
}

TEST(Widen, HandsTheGradientOnAsItCame) {
  for (const std::optional<at::ScalarType> dtype : {std::optional(at::kFloat), std::optional<at::ScalarType>()}) {
    const at::Tensor weight = narrow_leaf(dtype);
    const at::Tensor wide = widen(weight, at::kFloat);
    EXPECT_EQ(wide.scalar_type(), at::kFloat);
    (wide * kNotInBf16).sum().backward();
    EXPECT_EQ(weight.grad().scalar_type(), at::kFloat);
    EXPECT_EQ(weight.grad()[0].item<float>(), static_cast<float>(kNotInBf16));
  }
}

TEST(Widen, GivesALeafWhatItAsksFor) {
  const at::Tensor weight = narrow_leaf(at::kBFloat16);
  (widen(weight, at::kFloat) * kNotInBf16).sum().backward();
  EXPECT_EQ(weight.grad().scalar_type(), at::kBFloat16);
}

TEST(Widen, IsAPlainCastElsewhere) {
  const at::Tensor weight = narrow_leaf(at::kFloat), made = weight * 2, frozen = at::ones({3}, at::kBFloat16);
  EXPECT_TRUE(widen(weight, at::kBFloat16).is_same(weight));
  EXPECT_FALSE(widen(frozen, at::kFloat).requires_grad());
  (widen(made, at::kFloat) * kNotInBf16).sum().backward();
  EXPECT_EQ(weight.grad()[0].item<float>(), 2) << "an intermediate value is rounded as ever";
}

TEST(Widen, HasASecondDerivative) {
  const at::Tensor weight = narrow_leaf(at::kFloat);
  const at::Tensor loss = widen(weight, at::kFloat).pow(3).sum();
  const at::Tensor first = torch::autograd::grad({loss}, {weight}, {}, true, /*create_graph=*/true)[0];
  first.sum().backward();
  EXPECT_EQ(weight.grad()[1].item<float>(), 6);
}

/// Several chunks, one, and in backward; products in fp32 and in bf16.
TEST(Widen, TheHeadsLossHandsTheSumOverItsChunksOn) {
  const at::Tensor hidden = at::ones({7, 4}).cumsum(0).div_(8), labels = at::ones({7}, at::kLong).cumsum(0).remainder_(5);
  for (const at::ScalarType compute : {at::kFloat, at::kBFloat16}) {
    for (const int64_t chunk : {2, 7}) {
      for (const bool in_backward : {false, true}) {
        const auto gradient = [&](at::ScalarType dtype, at::ScalarType taken_in) {
          const at::Tensor weight = at::ones({5, 4}, at::kFloat).cumsum(0).div_(16).to(dtype).requires_grad_(true);
          weight.set_grad_dtype(taken_in);
          linear_cross_entropy(hidden, weight, labels, {.chunk_tokens = chunk, .compute_dtype = compute, .in_backward = in_backward}).backward();
          return weight.grad();
        };
        const at::Tensor want = gradient(at::kFloat, at::kFloat);
        EXPECT_TRUE(at::equal(gradient(at::kBFloat16, at::kFloat), want)) << compute << " " << chunk << " " << in_backward;
        EXPECT_TRUE(at::equal(gradient(at::kBFloat16, at::kBFloat16), want.to(at::kBFloat16))) << compute << " " << chunk << " " << in_backward;
      }
    }
  }
}

}  // namespace
}  // namespace tessera::kernels
