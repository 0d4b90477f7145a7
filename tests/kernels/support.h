#pragma once

#include <algorithm>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

/// Shared by the kernel tests: every fused kernel is held against its reference in double precision, values and gradients.
namespace tessera::testing_support {

/// What rounding the result to `dtype` and sums of a few thousand terms in fp32 leave, relative to a tensor's largest entry.
inline double tolerance(at::ScalarType dtype) { return dtype == at::kFloat ? 2e-6 : 8e-3; }

/// Normal numbers, the same for the same seed, rounded to `dtype`.
inline at::Tensor random(at::IntArrayRef shape, at::ScalarType dtype = at::kFloat, uint64_t seed = 1) {
  auto generator = at::detail::createCPUGenerator(seed);
  return at::randn(shape, generator, at::kFloat).to(dtype);
}

/// Below this a tensor counts as zero but for rounding, and differences are measured against it.
inline constexpr double kSmallestScale = 0.01;

/// Largest difference relative to the largest entry of `expected`.
inline double relative_difference(const at::Tensor& actual, const at::Tensor& expected) {
  EXPECT_EQ(actual.sizes(), expected.sizes());
  if (expected.numel() == 0) return 0;
  const at::Tensor a = actual.detach().to(at::kDouble), e = expected.detach().to(at::kDouble);
  return (a - e).abs().max().item().toDouble() / std::max(kSmallestScale, e.abs().max().item().toDouble());
}

inline void expect_close(const at::Tensor& actual, const at::Tensor& expected, double tolerance, const std::string& what) {
  EXPECT_LE(relative_difference(actual, expected), tolerance) << what;
}

using Operator = std::function<at::Tensor(const std::vector<at::Tensor>&)>;

struct Evaluation {
  at::Tensor result;
  std::vector<at::Tensor> gradients;
};

/// Value of f and gradients of sum(f * cotangent) for every floating-point input, all inputs cast to `dtype` first (undefined: as they are).
inline Evaluation evaluate(const Operator& f, const std::vector<at::Tensor>& inputs, const at::Tensor& cotangent,
                           std::optional<at::ScalarType> dtype = std::nullopt) {
  std::vector<at::Tensor> leaves;
  for (const auto& input : inputs) {
    const bool floating = input.is_floating_point();
    at::Tensor leaf = (floating && dtype ? input.to(*dtype) : input).detach();
    leaves.push_back(floating ? leaf.requires_grad_(true) : leaf);
  }
  Evaluation evaluation{f(leaves), {}};
  evaluation.result.backward(cotangent.to(evaluation.result.scalar_type()));
  for (const auto& leaf : leaves) {
    if (leaf.is_floating_point()) evaluation.gradients.push_back(leaf.grad());
  }
  return evaluation;
}

/// Holds `fused` on `inputs` against `reference` on the same numbers in double precision.
inline void expect_same(const Operator& fused, const Operator& reference, const std::vector<at::Tensor>& inputs, double tolerance) {
  const at::Tensor probe = [&] {
    const at::NoGradGuard no_grad;
    return fused(inputs);
  }();
  const at::Tensor cotangent = random(probe.sizes(), probe.scalar_type(), 99);
  const Evaluation actual = evaluate(fused, inputs, cotangent);
  const Evaluation expected = evaluate(reference, inputs, cotangent, at::kDouble);
  expect_close(actual.result, expected.result, tolerance, "result");
  for (size_t i = 0; i < expected.gradients.size(); ++i) {
    ASSERT_EQ(actual.gradients[i].defined(), expected.gradients[i].defined()) << "gradient " << i;
    if (expected.gradients[i].defined()) expect_close(actual.gradients[i], expected.gradients[i], tolerance, "gradient " + std::to_string(i));
  }
}

/// f with 1 and with 2 threads must give the same bits.
inline void expect_thread_independent(const std::function<std::vector<at::Tensor>()>& f) {
  const int before = at::get_num_threads();
  at::set_num_threads(1);
  const auto one = f();
  at::set_num_threads(2);
  const auto two = f();
  at::set_num_threads(before);
  ASSERT_EQ(one.size(), two.size());
  for (size_t i = 0; i < one.size(); ++i) EXPECT_TRUE(at::equal(one[i], two[i])) << "tensor " << i;
}

template <class E, class F>
std::string message_of(F&& f) {
  try {
    f();
  } catch (const E& error) {
    return error.what();
  }
  return "nothing was thrown";
}

}  // namespace tessera::testing_support
