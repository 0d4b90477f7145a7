#include "tessera/nn/weight_gradients.h"

#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

#include <ATen/autocast_mode.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/randn.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include "tessera/kernels/grouped_linear.h"
#include "tessera/kernels/products.h"
#include "tessera/memory/memory.h"
#include "tessera/nn/gradient_dispatcher.h"
#include "tessera/nn/layers.h"
#include "tessera/nn/operators.h"

namespace tessera::nn {
namespace {

struct Gradients {
  at::Tensor x, weight, bias;
};

Gradients gradients_of(Linear& linear, const at::Tensor& values, const std::shared_ptr<WeightGradients>& later) {
  linear->zero_grad();
  const at::Tensor x = values.detach().clone().requires_grad_();
  {
    const LeaveWeightGradients scope(later);
    (linear(x) * 1.5).pow(2).sum().backward();
  }
  if (later) {
    EXPECT_FALSE(linear->weight.grad().defined()) << "it was not left";
    EXPECT_FALSE(later->empty());
    later->compute();
    EXPECT_TRUE(later->empty());
  }
  return {x.grad(), linear->weight.grad().clone(), linear->bias.defined() ? linear->bias.grad().clone() : at::zeros({1})};
}

TEST(WeightGradients, ComputedLaterHaveTheBitsOfThoseComputedAtOnce) {
  for (const bool bias : {false, true}) {
    for (const at::ScalarType compute : {at::kFloat, at::kBFloat16, at::kHalf}) {
      for (const bool native : {false, true}) {
        const kernels::Bf16ProductsGuard products(native);
        for (const std::vector<int64_t>& shape : std::vector<std::vector<int64_t>>{{5, 24}, {3, 7, 24}, {2, 3, 5, 24}, {24}}) {
          SCOPED_TRACE(std::string(c10::toString(compute)) + (bias ? ", with a bias" : "") + (native ? ", native" : ", widened") + ", " +
                       std::to_string(shape.size()) + " dimensions");
          Linear linear(LinearOptions(24, 40).bias(bias));
          linear->set_compute_dtype(compute);
          const at::Tensor x = at::randn(shape);
          const Gradients at_once = gradients_of(linear, x, nullptr), later = gradients_of(linear, x, std::make_shared<WeightGradients>());
          EXPECT_TRUE(at::equal(later.x, at_once.x));
          EXPECT_TRUE(at::equal(later.weight, at_once.weight));
          EXPECT_TRUE(at::equal(later.bias, at_once.bias));
        }
      }
    }
  }
}

/// Around the forward alone, as libtorch recommends it: backward goes by the casts of the forward.
TEST(WeightGradients, UnderAutocastHaveTheBitsOfThoseComputedAtOnce) {
  for (const bool bias : {false, true}) {
    for (const bool native : {false, true}) {
      const kernels::Bf16ProductsGuard products(native);
      Linear first(LinearOptions(24, 40).bias(bias)), second(LinearOptions(40, 8).bias(bias));
      const at::Tensor x = at::randn({5, 24});
      const auto gradients = [&](const std::shared_ptr<WeightGradients>& later) {
        const LeaveWeightGradients scope(later);
        const at::Tensor in = x.detach().clone().requires_grad_();
        const auto type = x.device().type();
        at::autocast::set_autocast_dtype(type, at::kBFloat16);
        at::autocast::set_autocast_enabled(type, true);
        const at::Tensor out = second(first(in).tanh());
        at::autocast::set_autocast_enabled(type, false);
        at::autocast::clear_cache();
        EXPECT_EQ(out.scalar_type(), at::kBFloat16);
        out.to(at::kFloat).pow(2).sum().backward();
        if (later) later->compute();
        std::vector<at::Tensor> all{in.grad()};
        for (Linear* layer : {&first, &second}) {
          for (const at::Tensor& parameter : (*layer)->parameters()) {
            EXPECT_EQ(parameter.grad().scalar_type(), at::kFloat);
            all.push_back(parameter.grad().clone());
          }
          (*layer)->zero_grad();
        }
        return all;
      };
      const auto at_once = gradients(nullptr), later = gradients(std::make_shared<WeightGradients>());
      for (size_t i = 0; i < at_once.size(); ++i) EXPECT_TRUE(at::equal(later[i], at_once[i])) << i << (native ? ", native" : ", widened");
    }
  }
}

TEST(WeightGradients, OfFp8ProductsAreLeftToo) {
  for (const auto scaling : {kernels::Fp8Scaling::Tensor, kernels::Fp8Scaling::Row}) {
    for (const bool bias : {false, true}) {
      for (const at::ScalarType compute : {at::kFloat, at::kBFloat16}) {
        Linear linear(LinearOptions(32, 48).bias(bias));
        linear->set_compute_dtype(compute);
        linear->set_fp8(scaling);
        const at::Tensor x = at::randn({2, 8, 32});
        const Gradients at_once = gradients_of(linear, x, nullptr), later = gradients_of(linear, x, std::make_shared<WeightGradients>());
        EXPECT_TRUE(at::equal(later.x, at_once.x));
        EXPECT_TRUE(at::equal(later.weight, at_once.weight));
        EXPECT_TRUE(at::equal(later.bias, at_once.bias));
      }
    }
  }
}

/// Counted: backward computes what it would for frozen weights, and the rest comes later.
TEST(WeightGradients, NothingOfThemIsComputedInBackward) {
  for (const bool fp8 : {false, true}) {
    Linear linear(LinearOptions(32, 48).bias(false));
    if (fp8) linear->set_fp8(kernels::Fp8Scaling::Tensor);
    const auto later = std::make_shared<WeightGradients>();
    const auto flops_of = [](const auto& body) {
      const auto counter = std::make_shared<FlopCounter>();
      const OperatorScope counted(counter);
      body();
      return counter->flops();
    };
    const at::Tensor x = at::randn({16, 32}).requires_grad_();
    at::Tensor y;
    const double forward = flops_of([&] {
      const LeaveWeightGradients scope(later);
      y = linear(x);
    });
    EXPECT_EQ(forward, 2.0 * 16 * 32 * 48);
    EXPECT_EQ(flops_of([&] { y.sum().backward(); }), forward) << "fp8 " << fp8;
    EXPECT_EQ(flops_of([&] { later->compute(); }), forward) << "fp8 " << fp8;
  }
}

TEST(WeightGradients, AreFinalOnceAllThatWerePromisedHaveCome) {
  Linear linear(LinearOptions(4, 4).bias(false));
  const auto phase = std::make_shared<StepPhase>();
  auto& dispatcher = GradientDispatcher::of(linear->weight);
  dispatcher.follow(phase);
  int accumulated = 0, final = 0;
  const auto a = dispatcher.listen([&](const at::Tensor&) { ++accumulated; }), b = dispatcher.listen_final([&](const at::Tensor&) { ++final; });
  std::vector<std::shared_ptr<WeightGradients>> later;
  for (int micro = 0; micro < 2; ++micro) {
    const LeaveWeightGradients scope(later.emplace_back(std::make_shared<WeightGradients>()));
    linear(at::ones({2, 4}).requires_grad_()).sum().backward();
  }
  EXPECT_EQ(accumulated, 0);
  later[0]->compute();
  EXPECT_EQ(accumulated, 1);
  EXPECT_EQ(final, 0);
  later[1]->compute();
  EXPECT_EQ(final, 1);
  EXPECT_TRUE(at::equal(linear->weight.grad(), at::full({4, 4}, 4.0)));
}

TEST(WeightGradients, APassForOtherGradientsLeavesNothing) {
  Linear linear(4, 4);
  const auto later = std::make_shared<WeightGradients>();
  const LeaveWeightGradients scope(later);
  const at::Tensor x = at::ones({2, 4}).requires_grad_(), y = linear(at::tanh(linear(x)));
  EXPECT_TRUE(torch::autograd::grad({y.sum()}, {x}, {}, /*retain_graph=*/true)[0].defined());
  EXPECT_TRUE(later->empty());
  y.sum().backward();
  EXPECT_FALSE(later->empty());
}

TEST(WeightGradients, APenaltyOnTheInputsGradientIsAsIfNothingWereLeft) {
  Linear first(4, 5), second(5, 3);
  const auto of_a_penalty = [&](const std::shared_ptr<WeightGradients>& later) {
    first->zero_grad();
    second->zero_grad();
    {
      const LeaveWeightGradients scope(later);
      const at::Tensor x = at::arange(8, at::kFloat).view({2, 4}).mul(0.1).requires_grad_(), y = second(at::tanh(first(x)));
      const at::Tensor slope = torch::autograd::grad({y.sum()}, {x}, {}, /*retain_graph=*/true, /*create_graph=*/true)[0];
      (y.square().sum() + slope.square().sum()).backward();
    }
    if (later) later->compute();
    return std::vector{first->weight.grad(), first->bias.grad(), second->weight.grad(), second->bias.grad()};
  };
  const auto at_once = of_a_penalty(nullptr), later = of_a_penalty(std::make_shared<WeightGradients>());
  for (size_t i = 0; i < at_once.size(); ++i) EXPECT_TRUE(at::allclose(later[i], at_once[i], 1e-5, 1e-6)) << i;
}

/// The gradient of a leaf behind the layer is a view of what the layer keeps, and the second pass adds to it before the first pass's weight gradients come.
TEST(WeightGradients, WhatALeafHasTakenOverIsKeptAsItWas) {
  Linear linear(4, 4);
  const at::Tensor stacked = at::randn({8, 4}).requires_grad_(), shift = at::zeros({1, 5, 4}).requires_grad_();
  const auto one_by_one = [&](const at::Tensor& x) { return linear(x); };
  const auto grouped = [&](const at::Tensor& x) {
    const bool leaves = leaves_weight_gradients(x, {stacked});
    return grouped_with_weights_later(x, (leaves ? stacked.detach() : stacked).view({2, 4, 4}), stacked, {2, 3});
  };
  for (const std::function<at::Tensor(const at::Tensor&)>& layer : {std::function<at::Tensor(const at::Tensor&)>(one_by_one), {grouped}}) {
    const auto gradients = [&](bool leaves) {
      const std::vector<at::Tensor> leaf{linear->weight, linear->bias, stacked, shift};
      for (const at::Tensor& one : leaf) one.mutable_grad().reset();
      std::vector<std::shared_ptr<WeightGradients>> later;
      for (int i = 0; i < 3; ++i) {
        if (leaves) later.push_back(std::make_shared<WeightGradients>());
        const LeaveWeightGradients scope(leaves ? later.back() : nullptr);
        const at::Tensor x = (at::arange(20).view({5, 4}) + i).sin().requires_grad_();
        at::tanh(layer(x) + shift.squeeze(0)).sum().backward();
        if (leaves) later.back()->own();
      }
      for (const auto& one : later) one->compute();
      std::vector<at::Tensor> made;
      for (const at::Tensor& one : leaf) made.push_back(one.grad().defined() ? one.grad().clone() : at::zeros_like(one));
      return made;
    };
    const auto at_once = gradients(false), later = gradients(true);
    for (size_t i = 0; i < at_once.size(); ++i) EXPECT_TRUE(at::equal(later[i], at_once[i])) << i;
  }
}

/// Nor is what two layers have in common.
TEST(WeightGradients, WhatNobodyElseHoldsIsNotCopied) {
  Linear first(4, 4), one(4, 4), other(4, 4);
  MemoryTracker tracker;
  const TrackMemory tracking(tracker);
  const auto later = std::make_shared<WeightGradients>();
  {
    const LeaveWeightGradients scope(later);
    const at::Tensor h = at::tanh(first(at::ones({5, 4}).requires_grad_()));
    (h + one(h) + other(at::tanh(h))).pow(2).sum().backward();
  }
  tracker.reset_peak();
  const int64_t before = tracker.current();
  later->own();
  EXPECT_EQ(tracker.peak(), before);
  later->compute();
}

TEST(WeightGradients, WhatIsGivenUpIsPromisedNoMore) {
  Linear linear(LinearOptions(4, 4).bias(false));
  int final = 0;
  const auto phase = std::make_shared<StepPhase>();
  GradientDispatcher::of(linear->weight).follow(phase);
  const auto listening = GradientDispatcher::of(linear->weight).listen_final([&](const at::Tensor&) { ++final; });
  {
    const LeaveWeightGradients scope(std::make_shared<WeightGradients>());
    linear(at::ones({2, 4}).requires_grad_()).sum().backward();
  }
  linear(at::ones({2, 4})).sum().backward();
  EXPECT_EQ(final, 1);
}

/// A step that ends because one cannot be computed, or delivered, leaves nobody waiting in those that follow.
TEST(WeightGradients, WhatIsBehindOneThatFailsIsPromisedNoMore) {
  const std::vector<std::function<at::Tensor()>> failures{[]() -> at::Tensor { throw std::runtime_error("out of memory"); }, [] { return at::ones({7}); }};
  for (const auto& fails : failures) {
    const auto phase = std::make_shared<StepPhase>();
    std::vector<at::Tensor> parameters;
    std::vector<int> final(3, 0);
    std::vector<Attachment> listening;
    WeightGradients later;
    for (size_t i = 0; i < 3; ++i) {
      parameters.push_back(at::zeros({4}).requires_grad_());
      GradientDispatcher& dispatcher = GradientDispatcher::of(parameters[i]);
      dispatcher.follow(phase);
      listening.push_back(dispatcher.listen_final([&final, i](const at::Tensor&) { ++final[i]; }));
      later.leave(parameters[i], i == 1 ? fails : [] { return at::ones({4}); });
    }
    EXPECT_ANY_THROW(later.compute());
    EXPECT_EQ(final, (std::vector<int>{1, 0, 0}));
    EXPECT_TRUE(later.empty());
    later.compute();  // nothing of the step that failed
    EXPECT_FALSE(parameters[2].grad().defined());
    ++phase->step;
    (parameters[0] + parameters[1] + parameters[2]).sum().backward();
    EXPECT_EQ(final, (std::vector<int>{2, 1, 1}));
  }
}

TEST(WeightGradients, FrozenWeightsAndInputsWithoutAGradientAreAsAlways) {
  Linear linear(4, 4);
  const auto later = std::make_shared<WeightGradients>();
  const LeaveWeightGradients scope(later);
  linear(at::ones({2, 4})).sum().backward();  // nothing waits for an input's gradient
  EXPECT_TRUE(linear->weight.grad().defined());
  linear->weight.set_requires_grad(false);
  const at::Tensor x = at::ones({2, 4}).requires_grad_();
  linear(x).sum().backward();
  EXPECT_TRUE(x.grad().defined());
  EXPECT_TRUE(later->empty());
  {
    const LeaveWeightGradients none(nullptr);
    EXPECT_EQ(LeaveWeightGradients::current(), nullptr);
  }
  EXPECT_EQ(LeaveWeightGradients::current(), later);
}

/// Of rows that are of a group, forward and for both gradients; a group without rows costs nothing.
TEST(FlopCounter, CountsTheRowsThatGroupsHave) {
  const at::Tensor x = at::randn({9, 6}).requires_grad_(), weight = at::randn({3, 4, 6}).requires_grad_();
  const auto counter = std::make_shared<FlopCounter>();
  const OperatorScope counted(counter);
  const at::Tensor y = kernels::grouped_linear(x, weight, {5, 0, 2});
  EXPECT_EQ(counter->flops(), 2.0 * 7 * 6 * 4);
  y.sum().backward();
  EXPECT_EQ(counter->flops(), 3 * 2.0 * 7 * 6 * 4);
}

/// By the kernel of any device: those of CUDA are not run where this is.
TEST(FlopCounter, CountsAttentionOfEveryDevice) {
  const at::Tensor q = at::empty({2, 3, 5, 4}, at::kMeta), k = at::empty({2, 3, 7, 4}, at::kMeta);
  const double product = 2.0 * 2 * 3 * 5 * 7 * 4;
  for (const std::string kernel : {"flash_attention_for_cpu", "flash_attention", "efficient_attention", "cudnn_attention", "fused_attention_overrideable"}) {
    const std::string name = "aten::_scaled_dot_product_" + kernel;
    EXPECT_EQ(product_flops(name, std::vector<c10::IValue>{q, k, k}), 2 * product) << name;
    EXPECT_EQ(product_flops(name + "_backward", std::vector<c10::IValue>{q, q, k, k}), 5 * product) << name;
  }
  EXPECT_EQ(product_flops("aten::_scaled_dot_product_attention_math", std::vector<c10::IValue>{q, k, k}), 0) << "its products are seen";
}

}  // namespace
}  // namespace tessera::nn
