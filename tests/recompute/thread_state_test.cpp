#include "tessera/recompute/thread_state.h"

#include <thread>
#include <tuple>

#include <ATen/Context.h>
#include <ATen/ThreadLocalState.h>
#include <ATen/autocast_mode.h>
#include <gtest/gtest.h>
#include <torch/nn/functional/dropout.h>

#include "tessera/kernels/choice.h"
#include "tessera/memory/memory.h"
#include "tessera/recompute/recompute.h"
#include "tests/recompute/net.h"

namespace tessera {
namespace {

using namespace tessera::testing_support;

/// libtorch's dropout draws from the process's generator.
struct RandomImpl : nn::Module {
  at::Tensor forward(const at::Tensor& x) { return torch::nn::functional::detail::dropout(x * x, 0.5, true, false).exp(); }
};
TESSERA_MODULE(Random);

TEST(RecomputeState, DrawsTheSameRandomNumbersAndGoesOnAsWithout) {
  std::vector<at::Tensor> seen[2];
  for (const bool again : {false, true}) {
    Random random;
    Attachment attached;
    if (again) attached = recompute(random, {.modules = ""});
    at::manual_seed(7);
    const at::Tensor x = input(20).requires_grad_();
    const at::Tensor y = random(x);
    seen[again].push_back(at::rand({4}));
    y.sum().backward();
    seen[again].push_back(at::rand({4}));
    seen[again].push_back(x.grad());
  }
  for (size_t i = 0; i < seen[0].size(); ++i) EXPECT_TRUE(at::equal(seen[0][i], seen[1][i])) << i;
}

TEST(RecomputeState, TheSampleIsTheOneOfTheFirstPass) {
  Net net(2);
  const auto grads = [&] {
    net->zero_grad();
    at::Tensor loss;
    {
      nn::SampleScope sample({.seed = 5, .step = 2, .first_sample = 4});
      loss = net(input()).sum();
    }
    nn::SampleScope other({.seed = 5, .step = 3});
    loss.backward();
    return net->layers[0]->w1->weight.grad().clone();
  };
  const at::Tensor plain = grads();
  const auto again = recompute(net);
  EXPECT_TRUE(at::equal(grads(), plain));
}

/// As on a device whose backward has a thread of its own: nothing that the second pass needs may be left behind on the thread of the first.
TEST(RecomputeState, BackwardMayRunOnAnotherThread) {
  Net net(3);
  const Result plain = run(net);
  const auto again = recompute(net);
  net->zero_grad();
  const at::Tensor x = input().requires_grad_();
  MemoryTracker tracker;
  at::Tensor loss;
  {
    const nn::SampleScope sample({.seed = 5, .step = 2});
    const TrackMemory tracking(tracker);
    const MemoryScope activations(MemoryCategory::Activations);
    loss = net(x).pow(2).sum();
  }
  const int64_t kept = tracker.current(MemoryCategory::Activations);
  tracker.reset_peak();
  std::thread([&] { loss.backward(); }).join();
  Result result{.loss = loss, .gradients = {x.grad()}};
  for (const auto& p : net->parameters()) result.gradients.push_back(p.grad().clone());
  expect_same_bits(result, plain);
  EXPECT_EQ(net->calls(), 3 + 6);
  EXPECT_GT(tracker.peak(), kept) << "what is computed again counts where the first pass counted";
}

/// As Gloo's threads do with a collective of the second pass: they take the calling thread's state over, callbacks of operators included.
TEST(RecomputeState, AnotherThreadMayWorkInItsState) {
  struct HelpedImpl : nn::Module {
    at::Tensor forward(const at::Tensor& x) {
      at::Tensor sum;
      const at::ThreadLocalState state;
      std::thread([&] {
        const at::ThreadLocalStateGuard taken_over(state);
        const at::NoGradGuard no_grad;
        sum = x.view(-1).sum();
      }).join();
      return (x * sum).exp();
    }
  };
  const auto gradient = [](bool recomputed) {
    auto helped = std::make_shared<HelpedImpl>();
    const auto again = recomputed ? recompute(*helped, {.modules = ""}) : Attachment();
    const at::Tensor x = input().requires_grad_();
    nn::call(*helped, x).sum().backward();
    return x.grad();
  };
  EXPECT_TRUE(at::equal(gradient(true), gradient(false)));
}

TEST(RecomputeState, KernelsAreThoseOfTheFirstPass) {
  struct ChoosingImpl : nn::Module {
    at::Tensor forward(const at::Tensor& x) {
      choices.push_back(kernels::kernel_choices());
      return x.exp();
    }
    std::vector<kernels::KernelChoices> choices;
  };
  auto choosing = std::make_shared<ChoosingImpl>();
  const auto again = recompute(*choosing, {.modules = ""});
  at::Tensor y;
  {
    const kernels::KernelChoiceGuard reference(kernels::KernelChoice::Reference);
    y = nn::call(*choosing, input().requires_grad_());
  }
  y.sum().backward();
  EXPECT_EQ(choosing->choices, std::vector(2, kernels::KernelChoices(kernels::KernelChoice::Reference)));
  EXPECT_EQ(kernels::kernel_choices(), kernels::KernelChoices());
}

/// Backward puts autocast back of its own accord, so what the guard leaves shows only without one.
TEST(RecomputeState, TheGuardLeavesAutocastAsItFoundIt) {
  const auto now = [] {
    return std::tuple(at::autocast::is_autocast_enabled(at::kCPU), at::autocast::get_autocast_dtype(at::kCPU), at::autocast::is_autocast_cache_enabled());
  };
  const auto set = [](bool enabled, at::ScalarType dtype, bool cache) {
    at::autocast::set_autocast_enabled(at::kCPU, enabled);
    at::autocast::set_autocast_dtype(at::kCPU, dtype);
    at::autocast::set_autocast_cache_enabled(cache);
  };
  const auto before = now();
  for (const bool on : {true, false}) {
    set(on, on ? at::kHalf : at::kBFloat16, !on);
    const auto first = now();
    const ThreadState state({});
    set(!on, on ? at::kBFloat16 : at::kHalf, on);
    const auto second = now();
    {
      const ThreadState::Guard guard(state);
      EXPECT_EQ(now(), first);
    }
    EXPECT_EQ(now(), second);
  }
  std::apply(set, before);
}

/// Autocast casts a weight once and keeps the copy: where two blocks share one, the second block finds it cast. So does the second pass, whose own first use
/// may be the other block's.
TEST(RecomputeState, AutocastIsTheOneOfTheFirstPass) {
  for (const bool shared : {false, true}) {
    Net net(2, shared);
    const auto grads = [&] {
      const nn::SampleScope sample({.seed = 5, .step = 2});
      net->zero_grad();
      at::autocast::set_autocast_dtype(at::kCPU, at::kBFloat16);
      at::autocast::set_autocast_enabled(at::kCPU, true);
      const at::Tensor loss = net(input()).to(at::kFloat).sum();
      at::autocast::set_autocast_enabled(at::kCPU, false);
      at::autocast::clear_cache();
      loss.backward();
      return net->layers[0]->w1->weight.grad().clone();
    };
    const at::Tensor plain = grads();
    const auto again = recompute(net);
    EXPECT_TRUE(at::equal(grads(), plain)) << shared;
    EXPECT_FALSE(at::autocast::is_autocast_enabled(at::kCPU));
  }
}

/// Copies that autocast made for a second pass are those of weights that change before the next step.
TEST(RecomputeState, AutocastForgetsWhatItCastForTheSecondPass) {
  const auto second_loss = [](bool recomputed) {
    Net net(2);
    Attachment again;
    if (recomputed) again = recompute(net);
    at::Tensor loss;
    at::autocast::set_autocast_dtype(at::kCPU, at::kBFloat16);
    for (int step = 0; step < 2; ++step) {
      const nn::SampleScope sample({.seed = 5, .step = step + 1});
      net->zero_grad();
      at::autocast::set_autocast_enabled(at::kCPU, true);
      loss = net(input()).to(at::kFloat).sum();
      at::autocast::set_autocast_enabled(at::kCPU, false);
      at::autocast::clear_cache();
      loss.backward();
      const at::NoGradGuard no_grad;
      for (auto& parameter : net->parameters()) parameter.sub_(parameter.grad(), 0.1);
    }
    return loss.detach();
  };
  EXPECT_TRUE(at::equal(second_loss(true), second_loss(false)));
}

}  // namespace
}  // namespace tessera
