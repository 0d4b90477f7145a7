#include "tessera/kernels/adamw.h"

#include "tests/kernels/support.h"

namespace tessera::kernels {
namespace {

using namespace tessera::testing_support;

struct Moments {
  explicit Moments(int64_t n)
      : parameter(random({n})), gradient(random({n}, at::kFloat, 2)), exp_avg(random({n}, at::kFloat, 3)), exp_avg_sq(random({n}, at::kFloat, 4).square()) {}
  std::vector<at::Tensor> all() const { return {parameter, exp_avg, exp_avg_sq}; }
  at::Tensor parameter, gradient, exp_avg, exp_avg_sq;
};

constexpr AdamWStep kStep{.lr = 0.01, .beta1 = 0.8, .beta2 = 0.95, .eps = 1e-6, .weight_decay = 0.3, .step = 3};

TEST(AdamWKernel, EqualsLibtorchsFusedOperator) {
  for (const int64_t n : {1, 15, 16, 17, 1000, 40000}) {
    Moments ours(n), theirs(n);
    adamw_(ours.parameter, ours.gradient, ours.exp_avg, ours.exp_avg_sq, kStep);
    at::_fused_adamw_({theirs.parameter}, {theirs.gradient}, {theirs.exp_avg}, {theirs.exp_avg_sq}, {}, {at::full({}, 3.0f)}, kStep.lr, kStep.beta1,
                      kStep.beta2, kStep.weight_decay, kStep.eps, /*amsgrad=*/false, /*maximize=*/false);
    for (size_t i = 0; i < 3; ++i) expect_close(ours.all()[i], theirs.all()[i], 3e-7, "tensor " + std::to_string(i) + " of " + std::to_string(n));
  }
}

TEST(AdamWKernel, ClipsAndRoundsInTheSamePass) {
  for (const auto& [dtype, of_copy] : {std::pair{at::kFloat, at::kBFloat16}, {at::kBFloat16, at::kBFloat16}, {at::kHalf, at::kHalf}}) {
    Moments one(333), two(333);
    const at::Tensor gradient = one.gradient.to(dtype), copy = one.parameter.to(of_copy);
    AdamWStep clipped = kStep;
    clipped.gradient_scale = 0.37f;
    adamw_(one.parameter, gradient, one.exp_avg, one.exp_avg_sq, clipped, copy);
    adamw_(two.parameter, gradient.to(at::kFloat) * 0.37f, two.exp_avg, two.exp_avg_sq, kStep);
    for (size_t i = 0; i < 3; ++i) EXPECT_TRUE(at::equal(one.all()[i], two.all()[i])) << i;
    EXPECT_TRUE(at::equal(copy, one.parameter.to(of_copy)));
  }
}

TEST(AdamWKernel, FollowsACopyThatWasWritten) {
  for (const auto dtype : {at::kBFloat16, at::kHalf}) {
    Moments one(333), two(333);
    const at::Tensor copy = one.parameter.to(dtype);
    for (const int64_t i : {0, 7, 200, 332}) {
      copy[i] = 3;
      two.parameter[i] = 3;
    }
    adamw_(one.parameter, one.gradient, one.exp_avg, one.exp_avg_sq, kStep, copy);
    adamw_(two.parameter, two.gradient, two.exp_avg, two.exp_avg_sq, kStep);
    for (size_t i = 0; i < 3; ++i) EXPECT_TRUE(at::equal(one.all()[i], two.all()[i])) << i;
    EXPECT_TRUE(at::equal(copy, two.parameter.to(dtype)));
  }
}

TEST(AdamWKernel, BitsOfAnElementDoNotDependOnWhereAPartBegins) {
  Moments whole(50000), parts(50000);
  const auto update = [](const Moments& m, int64_t first, int64_t count) {
    const auto part = [&](const at::Tensor& tensor) { return tensor.narrow(0, first, count); };
    adamw_(part(m.parameter), part(m.gradient), part(m.exp_avg), part(m.exp_avg_sq), kStep);
  };
  update(whole, 0, 50000);
  for (const auto& [first, count] : {std::pair<int64_t, int64_t>{0, 7}, {7, 25}, {32, 20001}, {20033, 29967}}) update(parts, first, count);
  for (size_t i = 0; i < 3; ++i) EXPECT_TRUE(at::equal(whole.all()[i], parts.all()[i])) << i;
  expect_thread_independent([] {
    Moments m(50000);
    adamw_(m.parameter, m.gradient, m.exp_avg, m.exp_avg_sq, kStep);
    return m.all();
  });
}

}  // namespace
}  // namespace tessera::kernels
