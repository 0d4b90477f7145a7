#include "tessera/nn/gradient_guard.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/utils/clip_grad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include "tests/nn/net.h"

namespace tessera::nn {
namespace {

using ::testing::HasSubstr;
using testing_support::refusal;

TEST(GradientGuard, WhoReadsOrWritesItIsToldWhatToChange) {
  torch::nn::Linear linear(2, 3);
  for (const at::Tensor& parameter : linear->parameters()) parameter.mutable_grad() = make_gradient_guard(parameter, "'weight' lies in parts");
  const at::Tensor grad = linear->weight.grad();
  EXPECT_TRUE(is_gradient_guard(grad));
  EXPECT_FALSE(is_gradient_guard(at::ones({2})));
  EXPECT_FALSE(is_gradient_guard({}));
  EXPECT_EQ(grad.sizes(), linear->weight.sizes());
  const auto expect_refused = [](const char* what, const std::function<void()>& use) { EXPECT_THAT(refusal(use), HasSubstr("lies in parts")) << what; };
  expect_refused("norm", [&] { grad.norm(); });
  expect_refused("mul_", [&] { at::Tensor(grad).mul_(2); });
  expect_refused("add", [&] { at::ones({3, 2}).add_(grad); });
  expect_refused("clone", [&] { grad.clone(); });
  expect_refused("memory", [&] { (void)grad.storage(); });
  expect_refused("foreach", [&] { at::_foreach_norm({at::ones({2}), grad}); });
  expect_refused("cat", [&] { at::cat({at::ones({3, 2}), grad}); });
  expect_refused("clip_grad_norm_", [&] { torch::nn::utils::clip_grad_norm_(linear->parameters(), 1.0); });
  expect_refused("clip_grad_value_", [&] { torch::nn::utils::clip_grad_value_(linear->parameters(), 1.0); });
  expect_refused("SGD", [&] { torch::optim::SGD(linear->parameters(), 0.1).step(); });
  expect_refused("momentum", [&] { torch::optim::SGD(linear->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9)).step(); });
  expect_refused("Adam", [&] { torch::optim::Adam(linear->parameters()).step(); });
  expect_refused("AdamW", [&] { torch::optim::AdamW(linear->parameters()).step(); });
  expect_refused("in a backward pass", [&] { linear(at::ones({1, 2})).sum().backward(); });
}

TEST(GradientGuard, ZeroGradClearsItInBothWays) {
  torch::nn::Linear linear(2, 3);
  const at::Tensor guard = make_gradient_guard(linear->weight, "'weight' lies in parts");
  linear->weight.mutable_grad() = guard;
  EXPECT_FALSE(is_cleared(guard));
  linear->zero_grad(/*set_to_none=*/false);
  EXPECT_TRUE(is_gradient_guard(linear->weight.grad()));
  EXPECT_TRUE(is_cleared(guard));
  arm(guard);
  EXPECT_FALSE(is_cleared(guard));
  linear->zero_grad();
  EXPECT_FALSE(linear->weight.grad().defined());
}

/// At once, and by every way of clearing: what is done behind a clear comes behind it.
TEST(GradientGuard, TellsOfAClearWhenItHappens) {
  torch::nn::Linear linear(2, 3);
  const at::Tensor guard = make_gradient_guard(linear->weight, "'weight' lies in parts");
  std::string told;
  const auto show = [&] { linear->weight.mutable_grad() = make_gradient_guard_like(guard, [&](bool to_zeros) { told += to_zeros ? "zeros " : "none "; }); };
  const auto expect_told = [&](const std::string& expected) { EXPECT_EQ(std::exchange(told, {}), expected); };
  show();
  EXPECT_THAT(refusal([&] { linear->weight.grad().norm(); }), HasSubstr("lies in parts"));
  expect_told("");
  linear->zero_grad(/*set_to_none=*/false);
  linear->zero_grad(/*set_to_none=*/false);
  expect_told("zeros zeros ");
  linear->zero_grad();
  expect_told("none ");
  show();
  linear->weight.mutable_grad().reset();
  expect_told("none ");
  show();
  const c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl> name(linear->weight.grad().getIntrusivePtr());
  at::Tensor held = linear->weight.grad();
  linear->zero_grad();
  expect_told("");
  held.reset();
  expect_told("none ");
}

/// As copies of a tensor with memory are.
TEST(GradientGuard, ACopyIsTheSameGradient) {
  torch::nn::Linear linear(2, 3);
  std::string told;
  const at::Tensor like = make_gradient_guard(linear->weight, "'weight' lies in parts");
  at::Tensor& grad = linear->weight.mutable_grad();
  grad = make_gradient_guard_like(like, [&](bool to_zeros) { told += to_zeros ? "zeros " : "none "; });
  const auto expect_told = [&](const std::string& expected) { EXPECT_EQ(std::exchange(told, {}), expected); };
  EXPECT_NE(identity_of_guard(grad), identity_of_guard(like));
  EXPECT_EQ(identity_of_guard(at::ones({2})), nullptr);
  EXPECT_EQ(identity_of_guard(grad.data()), identity_of_guard(grad));
  EXPECT_EQ(identity_of_guard(grad.detach()), identity_of_guard(grad));
  expect_told("");  // copies have come and gone
  for (const auto& copied : {&at::Tensor::data, &at::Tensor::detach}) {
    (grad.*copied)().zero_();
    expect_told("zeros ");
    EXPECT_TRUE(is_cleared(grad));
    arm(grad);
  }
  EXPECT_FALSE(is_cleared(like));
  at::Tensor copy = grad.data();
  grad.zero_();
  expect_told("zeros ");
  EXPECT_TRUE(is_cleared(copy));
  EXPECT_THAT(refusal([&] { copy.norm(); }), HasSubstr("lies in parts"));
  grad = copy;
  expect_told("");
  grad.reset();
  expect_told("");
  copy.reset();
  expect_told("none ");
}

}  // namespace
}  // namespace tessera::nn
