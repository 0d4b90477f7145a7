#include <torch/csrc/autograd/autograd.h>

#include "tessera/core/error.h"
#include "tessera/kernels/choice.h"
#include "tessera/kernels/cross_entropy.h"
#include "tessera/kernels/dropout.h"
#include "tessera/kernels/linear_cross_entropy.h"
#include "tessera/kernels/rms_norm.h"
#include "tessera/kernels/rope.h"
#include "tessera/kernels/swiglu.h"
#include "tests/kernels/support.h"
#include "tests/refusal.h"

namespace tessera::kernels {
namespace {

using namespace tessera::testing_support;
using ::testing::HasSubstr;

/// Gradients of a penalty on the gradient: of sum((d sum(f^2) / d first input)^2), for every input.
std::vector<at::Tensor> of_a_penalty(const Operator& f, const std::vector<at::Tensor>& inputs) {
  std::vector<at::Tensor> leaves;
  for (const at::Tensor& input : inputs) leaves.push_back(input.detach().clone().requires_grad_());
  const at::Tensor slope = torch::autograd::grad({f(leaves).square().sum()}, {leaves[0]}, {}, /*retain_graph=*/true, /*create_graph=*/true)[0];
  slope.square().sum().backward();
  std::vector<at::Tensor> gradients;
  for (const at::Tensor& leaf : leaves) gradients.push_back(leaf.grad());
  return gradients;
}

struct Fused {
  std::string name;
  Operator f;
  std::vector<at::Tensor> inputs;
};

std::vector<Fused> fused_operators() {
  const at::Tensor x = random({6, 8}), labels = at::arange(6);
  return {
      {"rms_norm", [](const auto& in) { return rms_norm(in[0], in[1], 1e-5); }, {x, random({8})}},
      {"swiglu", [](const auto& in) { return swiglu(in[0], in[1]); }, {x, random({6, 8}, at::kFloat, 2)}},
      {"cross_entropy_sum", [=](const auto& in) { return cross_entropy_sum(in[0], labels); }, {x}},
      {"linear_cross_entropy", [=](const auto& in) { return linear_cross_entropy(in[0], in[1], labels); }, {x, random({9, 8}, at::kFloat, 3)}},
      {"linear_cross_entropy",
       [=](const auto& in) { return linear_cross_entropy(in[0], in[1], labels, {.in_backward = true}); },
       {x, random({9, 8}, at::kFloat, 3)}},
  };
}

TEST(SecondDerivatives, AreRefusedByNameWithTheReferenceAsTheWayOut) {
  for (const auto& [name, f, inputs] : fused_operators()) {
    const std::string text = refusal([&f = f, &inputs = inputs] { of_a_penalty(f, inputs); });
    EXPECT_THAT(text, HasSubstr(name + ": its gradient was differentiated once more"));
    EXPECT_THAT(text, HasSubstr("run.kernels = \"reference\""));
    const KernelChoiceGuard reference(KernelChoice::Reference);
    for (const at::Tensor& gradient : of_a_penalty(f, inputs)) EXPECT_TRUE(gradient.defined()) << name;
  }
}

/// A pass for what lies behind the operator, or before it, comes by the refusal, too.
TEST(SecondDerivatives, AreRefusedWhicheverInputIsAsked) {
  const at::Tensor x = random({6, 8}).requires_grad_(), gain = random({8}, at::kFloat, 2).requires_grad_();
  const at::Tensor y = swiglu(x.sin(), x) * gain;
  const at::Tensor slope = torch::autograd::grad({y.sum()}, {x}, {}, true, /*create_graph=*/true)[0];
  for (const at::Tensor& asked : {x, gain}) {
    EXPECT_THAT(refusal([&] { torch::autograd::grad({slope.sum()}, {asked}, {}, true); }), HasSubstr("swiglu: its gradient was differentiated once more"));
  }
}

TEST(SecondDerivatives, OfLinearOperatorsAreRight) {
  const at::Tensor angles = random({5, 4}), rows = at::arange(6);
  const Operator rotated = [&](const auto& in) { return rope(in[0].square(), angles.cos(), angles.sin()); };
  const Operator dropped = [&](const auto& in) { return dropout(in[0].square(), 0.5, /*key=*/7, rows); };
  const std::vector<Fused> operators{{"rope", rotated, {random({2, 5, 3, 8})}}, {"dropout", dropped, {random({6, 8})}}};
  for (const auto& [name, f, inputs] : operators) {
    const at::Tensor got = of_a_penalty(f, inputs)[0];
    const KernelChoiceGuard reference(KernelChoice::Reference);
    expect_close(got, of_a_penalty(f, inputs)[0], tolerance(at::kFloat), name);
  }
}

}  // namespace
}  // namespace tessera::kernels
