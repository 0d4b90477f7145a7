#include "tessera/optim/rounded.h"

#include <cmath>
#include <limits>

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include "tessera/core/rng.h"
#include "tessera/kernels/stochastic_update.h"
#include "tests/test_device.h"

namespace tessera::optim {
namespace {

float widened(uint16_t bits) { return static_cast<float>(c10::BFloat16(bits, c10::BFloat16::from_bits())); }

OptimConfig rounded_config(const std::string& name) {
  OptimConfig config;
  config.name = name;
  config.state_dtype = "bf16";
  config.momentum = 0.9;
  return config;
}

at::Tensor rounded_values(at::IntArrayRef sizes, const std::string& stream, float scale = 1) {
  return testing_support::floats_by(sizes, [&](float* out, int64_t n) { CounterRng(4, stream).fill_uniform(out, 0, n, -scale, scale); });
}

TEST(StochasticRounding, IsUnbiased) {
  const CounterRng rng(1, "draws");
  constexpr int64_t draws = 1 << 16;
  for (const float value : {1.001f, -1.001f, 3.14159f, 1e-20f, 65503.7f, 0.0f}) {
    double sum = 0;
    float low = std::numeric_limits<float>::infinity(), high = -low;
    for (int64_t i = 0; i < draws; ++i) {
      const float rounded = widened(kernels::stochastic_bf16(value, rng.bits(static_cast<uint64_t>(i))));
      sum += rounded;
      low = std::min(low, rounded), high = std::max(high, rounded);
    }
    EXPECT_LE(low, value);
    EXPECT_GE(high, value);
    const double spacing = static_cast<double>(high) - low;  // one bf16 step: the standard error is at most spacing / (2 sqrt(draws))
    EXPECT_LE(spacing, std::abs(value) / 128);
    EXPECT_NEAR(sum / draws, value, 4 * spacing / (2 * std::sqrt(static_cast<double>(draws)))) << value;
  }
}

TEST(StochasticRounding, KeepsWhatBf16HoldsAndWhatIsNotFinite) {
  for (const uint32_t random : {0u, 0x8000u, 0xffffu}) {
    for (const float value : {1.0f, -2.5f, 0.0f}) EXPECT_EQ(widened(kernels::stochastic_bf16(value, random)), value);
    EXPECT_EQ(widened(kernels::stochastic_bf16(std::numeric_limits<float>::infinity(), random)), std::numeric_limits<float>::infinity());
    EXPECT_TRUE(std::isnan(widened(kernels::stochastic_bf16(std::nanf(""), random))));
  }
}

class StochasticOptimizer : public ::testing::TestWithParam<std::tuple<std::string, at::ScalarType>> {
 protected:
  static std::string name() { return std::get<0>(GetParam()); }
  /// Of the weights: bf16, or fp32 beside state in bf16.
  static at::ScalarType dtype() { return std::get<1>(GetParam()); }

  /// Parameter and state after `steps` updates of `part` of the logical tensor "w" [9, 14].
  std::vector<at::Tensor> run(const Slice& part, int steps, at::ScalarType gradient_dtype) const {
    const at::Tensor weight = take(rounded_values({9, 14}, "w"), part).to(dtype()).contiguous();
    nn::set_slice(weight, part);
    const auto optimizer = make_optimizer(rounded_config(name()), {{"w", weight, {}}}, {}, 7);
    for (int step = 0; step < steps; ++step) {
      const at::Tensor gradient = take(rounded_values({9, 14}, "g" + std::to_string(step), 0.1f), part).to(at::kBFloat16).to(gradient_dtype);
      at::Tensor target = weight;
      target.mutable_grad() = gradient.contiguous();
      optimizer->step(1e-2);
    }
    std::vector<at::Tensor> tensors{weight};
    for (const auto& state : optimizer->state()) tensors.push_back(state.tensor);
    return tensors;
  }
};

TEST_P(StochasticOptimizer, BitsDoNotDependOnTheCut) {
  const std::vector<int64_t> shape{9, 14};
  const auto whole = run(Slice::whole("w", shape), 5, at::kFloat);
  EXPECT_EQ(whole.size(), name() == "adamw" ? 3 : 2);
  std::vector<Slice> parts;
  for (const int64_t dim : {0, 1}) {
    for (int index = 0; index < 5; ++index) {
      const auto [begin, size] = chunk(shape[dim], 5, index);
      parts.push_back(Slice::along("w", shape, dim, begin, size));
    }
  }
  parts.push_back(elements(Slice::whole("w", shape), 17, 61));                                          // begins and ends within rows
  parts.push_back({.name = "w", .shape = shape, .boxes = {Box{{0, 2}, {9, 3}}, Box{{0, 9}, {9, 2}}}});  // two runs of columns
  for (const Slice& part : parts) {
    const auto own = run(part, 5, at::kFloat);
    for (size_t i = 0; i < whole.size(); ++i) {
      at::Tensor expected = at::empty(own[i].sizes(), own[i].options());
      copy_slices({Slice::whole("w", shape)}, {whole[i]}, part, expected);
      EXPECT_TRUE(at::equal(own[i], expected)) << "tensor " << i << " of " << to_string(part.boxes.front());
    }
  }
}

/// Of many grains, so that each thread has several blocks of its own.
TEST_P(StochasticOptimizer, BitsDoNotDependOnTheThreads) {
  constexpr int64_t n = 5 * (1 << 14) + 77;
  const int before = at::get_num_threads();
  std::vector<std::vector<at::Tensor>> seen;
  for (const int threads : {1, 2, 3}) {
    at::set_num_threads(threads);
    at::Tensor weight = rounded_values({n}, "w").to(dtype());
    const auto optimizer = make_optimizer(rounded_config(name()), {{"w", weight, {}}}, {}, 7);
    for (int step = 0; step < 2; ++step) {
      weight.mutable_grad() = rounded_values({n}, "g" + std::to_string(step), 0.1f);
      optimizer->step(1e-2);
    }
    auto& tensors = seen.emplace_back(1, weight);
    for (const auto& state : optimizer->state()) tensors.push_back(state.tensor);
  }
  at::set_num_threads(before);
  for (size_t i = 0; i < seen[0].size(); ++i) {
    EXPECT_TRUE(at::equal(seen[1][i], seen[0][i])) << "tensor " << i;
    EXPECT_TRUE(at::equal(seen[2][i], seen[0][i])) << "tensor " << i;
  }
}

TEST_P(StochasticOptimizer, TakesGradientsOfEitherType) {
  const auto part = Slice::whole("w", {9, 14});
  const auto wide = run(part, 3, at::kFloat), narrow = run(part, 3, at::kBFloat16);
  for (size_t i = 0; i < wide.size(); ++i) EXPECT_TRUE(at::equal(wide[i], narrow[i]));
}

TEST_P(StochasticOptimizer, FollowsFp32OnTheAverage) {
  constexpr int64_t n = 4096;
  for (const double decay : {0.0, 10.0}) {
    OptimConfig config = rounded_config(name());
    config.weight_decay = decay;
    at::Tensor narrow = at::ones({n}, dtype()), wide = at::ones({n});
    const auto rounded = make_optimizer(config, {{"w", narrow, {}}}, {}, 3);
    config.state_dtype = "fp32";
    const auto exact = make_optimizer(config, {{"w", wide, {}}});
    for (int step = 0; step < 50; ++step) {
      narrow.mutable_grad() = at::full({n}, 0.25);
      wide.mutable_grad() = at::full({n}, 0.25);
      rounded->step(2e-4);  // far below bf16's spacing at 1: rounded to nearest, nothing would ever move
      exact->step(2e-4);
    }
    const double expected = wide.mean().item<double>(), spread = 1.0 / 128;
    EXPECT_LT(expected, 0.995);
    EXPECT_NEAR(narrow.to(at::kDouble).mean().item<double>(), expected, 5 * spread / std::sqrt(static_cast<double>(n))) << "decay " << decay;
  }
}

/// A weight in fp32 is not rounded: the first step, whose averages begin at zero, is the plain optimizer's.
TEST(RoundedState, LeavesWeightsInFp32Exact) {
  for (const char* name : {"adamw", "lion", "sgd"}) {
    OptimConfig config = rounded_config(name);
    at::Tensor ours = rounded_values({9, 14}, "w"), plain = ours.clone();
    const auto rounded = make_optimizer(config, {{"w", ours, {}}});
    config.state_dtype = "fp32";
    const auto exact = make_optimizer(config, {{"w", plain, {}}});
    ours.mutable_grad() = plain.mutable_grad() = rounded_values({9, 14}, "g", 0.1f);
    rounded->step(1e-2);
    exact->step(1e-2);
    EXPECT_TRUE(at::allclose(ours, plain, 1e-6, 1e-7)) << name;
    for (const auto& state : rounded->state()) EXPECT_EQ(state.tensor.scalar_type(), at::kBFloat16);
  }
}

INSTANTIATE_TEST_SUITE_P(Optimizers, StochasticOptimizer,
                         ::testing::Combine(::testing::Values("adamw", "sgd", "lion"), ::testing::Values(at::kBFloat16, at::kFloat)),
                         [](const auto& info) { return std::get<0>(info.param) + (std::get<1>(info.param) == at::kFloat ? "_fp32" : "_bf16"); });

}  // namespace
}  // namespace tessera::optim
