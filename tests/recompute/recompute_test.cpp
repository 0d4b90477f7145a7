#include "tessera/recompute/recompute.h"

#include <functional>
#include <thread>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/any.h>

#include "tessera/memory/memory.h"
#include "tessera/nn/gradient_dispatcher.h"
#include "tessera/nn/saved_tensors.h"
#include "tests/recompute/net.h"

namespace tessera {
namespace {

using namespace tessera::testing_support;
using ::testing::AllOf;
using ::testing::HasSubstr;

TEST(Recompute, FiveBlocksAreRecomputedFiveTimes) {
  Net net(5);
  const Result plain = run(net);
  EXPECT_EQ(net->calls(), 5);
  {
    const auto again = recompute(net);
    expect_same_bits(run(net), plain);
    EXPECT_EQ(net->calls(), 5 + 10);
  }
  expect_same_bits(run(net), plain);
  EXPECT_EQ(net->calls(), 15 + 5) << "the destructor detaches";
}

TEST(Recompute, EveryOtherBlock) {
  Net net(5);
  const Result plain = run(net);
  const auto again = recompute(net, {.every = 2});
  expect_same_bits(run(net), plain);
  EXPECT_EQ(net->calls(), 5 + 5 + 3);
  EXPECT_EQ(net->layers[0]->calls, 3);
  EXPECT_EQ(net->layers[1]->calls, 2);
}

TEST(Recompute, NestedModulesAreRecomputedInside) {
  Net net(2);
  const Result plain = run(net);
  const auto inner = recompute(net, {.modules = "layers.*"});
  const auto outer = recompute(net, {.modules = ""});
  expect_same_bits(run(net), plain);
  // Forward; the whole again for the inputs of the blocks, broken off where the last block's input is known; each block.
  EXPECT_EQ(net->layers[0]->calls, 1 + 3);
  EXPECT_EQ(net->layers[1]->calls, 1 + 2);
  const auto innermost = recompute(net, {.modules = "layers.*.w1"});
  expect_same_bits(run(net), plain);
}

TEST(Recompute, SizesOfNothingAndOfOne) {
  for (int64_t rows : {0, 1, 7}) {
    Net net(3);
    const Result plain = run(net, rows);
    const auto again = recompute(net);
    expect_same_bits(run(net, rows), plain);
  }
}

TEST(Recompute, AWeightOfTwoBlocksGetsOneGradientAndItsHookFiresOnce) {
  Net net(2, /*shared=*/true);
  ASSERT_EQ(net->layers[0]->w1->weight.unsafeGetTensorImpl(), net->layers[1]->w1->weight.unsafeGetTensorImpl());
  const Result plain = run(net);
  int fired = 0;
  const auto listening = nn::GradientDispatcher::of(net->layers[0]->w1->weight).listen([&](const at::Tensor&) { ++fired; });
  const auto again = recompute(net);
  expect_same_bits(run(net), plain);
  EXPECT_EQ(fired, 1);
}

TEST(Recompute, StopsWhenTheLastTensorIsThere) {
  struct LateImpl : nn::Module {
    at::Tensor forward(const at::Tensor& x) {
      const at::Tensor y = x.exp();
      reached.push_back(nn::recomputing());
      return y + 1;  // saves nothing
    }
    std::vector<bool> reached;
  };
  auto late = std::make_shared<LateImpl>();
  const auto again = recompute(*late, {.modules = ""});
  const at::Tensor x = input().requires_grad_();
  nn::call(*late, x).sum().backward();
  EXPECT_EQ(late->reached, std::vector<bool>{false}) << "the second pass ends inside exp";
  EXPECT_TRUE(at::equal(x.grad(), x.detach().exp()));
}

TEST(Recompute, NothingHappensWithoutGradientsOrInEvaluation) {
  Net net(2);
  const auto again = recompute(net);
  {
    const at::NoGradGuard no_grad;
    net(input());
  }
  net->eval();
  const at::Tensor x = input().requires_grad_();
  net(x).sum().backward();
  EXPECT_EQ(net->calls(), 4);
}

TEST(Recompute, AGraphThatIsDroppedRecomputesNothing) {
  Net net(2);
  const auto again = recompute(net);
  net(input().requires_grad_());
  EXPECT_EQ(net->calls(), 2);
}

TEST(Recompute, OutlivesItsAttachmentWhileAGraphNeedsIt) {
  Net net(2);
  const Result plain = run(net);
  auto again = recompute(net);
  nn::SampleScope sample({.seed = 5, .step = 2});
  net->zero_grad();
  const at::Tensor loss = net(input()).pow(2).sum();
  again.detach();
  loss.backward();
  const auto parameters = net->parameters();
  for (size_t i = 0; i < parameters.size(); ++i) EXPECT_TRUE(at::equal(parameters[i].grad(), plain.gradients[i + 1]));
}

TEST(Recompute, DropsTheSameElementsAgainInALoopWithoutSampleScopes) {
  Net net(3);
  const auto train = [&] {
    torch::manual_seed(11);
    net->zero_grad();
    const at::Tensor x = input().requires_grad_();
    Result result{.loss = net(x).pow(2).sum() + net(x).sum(), .gradients = {}};
    result.loss.backward();
    result.gradients.push_back(x.grad());
    for (const auto& p : net->parameters()) result.gradients.push_back(p.grad().clone());
    return result;
  };
  const Result plain = train();
  EXPECT_FALSE(at::equal(net(input()), net(input())));
  const auto again = recompute(net);
  expect_same_bits(train(), plain);
}

TEST(Recompute, BackwardTwiceAndSecondDerivatives) {
  Net net(2);
  for (auto& layer : net->layers) layer->dropout->p = 0;  // the fused dropout has no second derivative
  const auto twice = [&] {
    nn::SampleScope sample({.seed = 1, .step = 1});
    net->zero_grad();
    const at::Tensor x = input().requires_grad_();
    const at::Tensor loss = net(x).pow(2).sum();
    loss.backward({}, /*retain_graph=*/true);
    const at::Tensor first = torch::autograd::grad({loss}, {x}, {}, true, /*create_graph=*/true).at(0);
    first.pow(2).sum().backward();
    Result result{.loss = first.detach(), .gradients = {x.grad()}};
    for (const auto& p : net->parameters()) result.gradients.push_back(p.grad().clone());
    return result;
  };
  const Result plain = twice();
  const auto again = recompute(net);
  expect_same_bits(twice(), plain);
}

/// Several outputs, lists, optionals.
struct ManyImpl : nn::Module {
  std::tuple<at::Tensor, std::vector<at::Tensor>> forward(const std::vector<at::Tensor>& xs, const std::optional<at::Tensor>& scale, int64_t times) {
    ++calls;
    std::vector<at::Tensor> squares;
    at::Tensor sum = xs.at(0) * 0;
    for (const auto& x : xs) {
      squares.push_back(x * x * static_cast<double>(times));
      sum = sum + (scale ? x * *scale : x).exp();
    }
    return {sum, squares};
  }
  int calls = 0;
};
TESSERA_MODULE(Many);

TEST(Recompute, TakesListsOptionalsAndSeveralOutputs) {
  for (const bool with_scale : {true, false}) {
    std::vector<std::vector<at::Tensor>> gradients;
    for (const bool again : {false, true}) {
      Many many;
      Attachment attached;
      if (again) attached = recompute(many, {.modules = ""});
      std::vector<at::Tensor> xs{input(1).requires_grad_(), input(1).mul(0.5).requires_grad_(), input(1)};
      std::optional<at::Tensor> scale;
      if (with_scale) scale = at::full({8}, 0.3).requires_grad_();
      auto [sum, squares] = many(xs, scale, 3);
      (sum.sum() + squares[0].sum() * 2 + squares[1].sum()).backward();
      EXPECT_EQ(many->calls, again ? 2 : 1);
      EXPECT_FALSE(xs[2].grad().defined());
      gradients.push_back({xs[0].grad(), xs[1].grad()});
      if (scale) gradients.back().push_back(scale->grad());
    }
    for (size_t i = 0; i < gradients[0].size(); ++i) EXPECT_TRUE(at::equal(gradients[0][i], gradients[1][i])) << i;
  }
}

/// A forward that can be told to do something else the second time.
struct FickleImpl : nn::Module {
  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor y = x.exp();
    return nn::recomputing() ? change(y) : (y * y).sin();
  }
  std::function<at::Tensor(const at::Tensor&)> change;
};
TESSERA_MODULE(Fickle);

TEST(Recompute, RefusesAForwardThatChanges) {
  const auto message = [](const std::function<at::Tensor(const at::Tensor&)>& change) {
    Fickle fickle;
    fickle->set_path("layers.3");
    fickle->change = change;
    const auto again = recompute(fickle, {.modules = ""});
    const at::Tensor x = at::ones({2, 3}).requires_grad_();
    const at::Tensor y = nn::call(*fickle, x);
    return refusal([&] { y.sum().backward(); });
  };
  EXPECT_THAT(message([](const at::Tensor& y) { return at::mm(y.t(), y); }),
              AllOf(HasSubstr("recompute 'layers.3'"), HasSubstr("aten::mm"), HasSubstr("[3, 2]"), HasSubstr("[2, 3]")));
  EXPECT_THAT(message([](const at::Tensor& y) { return y.to(at::kBFloat16).sin(); }), AllOf(HasSubstr("aten::sin saves BFloat16"), HasSubstr("saved Float")));
  EXPECT_THAT(message([](const at::Tensor& y) { return y + 1; }), AllOf(HasSubstr("no further tensor after aten::add"), HasSubstr("saved tensor 2 of 4")));
  EXPECT_EQ(message([](const at::Tensor& y) { return (y * y).sin(); }), "not refused");
}

TEST(Recompute, AnInputChangedInPlaceIsRefused) {
  Net net(1);
  const auto again = recompute(net);
  const at::Tensor x = input();
  const at::Tensor loss = net(x).sum();
  x.add_(1);
  EXPECT_THAT(refusal([&] { loss.backward(); }), HasSubstr("changed in place"));
}

/// What autograd refuses without recomputation, where it was saved.
TEST(Recompute, AParameterWrittenBeforeBackwardIsRefusedByName) {
  const auto with_write = [](const std::function<void(Net&)>& write) {
    Net net(2);
    const auto again = recompute(net);
    const at::Tensor loss = net(input()).sum();
    {
      const at::NoGradGuard no_grad;
      write(net);
    }
    return refusal([&] { loss.backward(); });
  };
  EXPECT_THAT(with_write([](Net& net) { net->layers[1]->w1->weight.mul_(0.9); }),
              AllOf(HasSubstr("recompute 'layers.1'"), HasSubstr("parameter 'w1.weight' was written between forward and backward")));
  EXPECT_EQ(with_write([](Net&) {}), "not refused");
}

/// Limits its weight as it goes, which changes nothing the second time.
struct LimitedImpl : nn::Module {
  LimitedImpl() : w(8, 8) { register_module("w", w); }
  at::Tensor forward(const at::Tensor& x) {
    {
      const at::NoGradGuard no_grad;
      w->weight.clamp_(-0.125, 0.125);
    }
    return w(x).exp();
  }
  nn::Linear w;
};
TESSERA_MODULE(Limited);

TEST(Recompute, AParameterThatItsForwardWritesIsNotRefused) {
  std::vector<at::Tensor> gradients;
  for (const bool recomputed : {false, true}) {
    Limited limited;
    {
      const at::NoGradGuard no_grad;
      for (auto& p : limited->parameters()) p.copy_(at::sin(at::arange(p.numel(), at::kFloat)).view_as(p));
    }
    const Attachment attached = recomputed ? recompute(limited, {.modules = ""}) : Attachment();
    limited(input()).sum().backward();
    gradients.push_back(limited->w->weight.grad());
  }
  EXPECT_TRUE(at::equal(gradients[0], gradients[1]));
}

/// Scales by a buffer, and counts its calls in another.
struct ScaledImpl : nn::Module {
  ScaledImpl() {
    scale = register_buffer("scale", at::ones({8}));
    seen = register_buffer("seen", at::zeros({}));
  }
  at::Tensor forward(const at::Tensor& x) {
    const at::NoGradGuard no_grad;
    seen.add_(1);
    const at::AutoGradMode on(true);
    return (x * scale).exp();
  }
  at::Tensor scale, seen;
};
TESSERA_MODULE(Scaled);

TEST(Recompute, ABufferWrittenBeforeBackwardIsRefusedUnlessItsForwardWritesIt) {
  Scaled scaled;
  const auto again = recompute(scaled, {.modules = ""});
  const at::Tensor first = scaled(input().requires_grad_()).sum(), second = scaled(input().requires_grad_()).sum();
  first.backward();
  second.backward();
  const at::Tensor third = scaled(input().requires_grad_()).sum();
  scaled->scale.mul_(2);
  EXPECT_THAT(refusal([&] { third.backward(); }), HasSubstr("buffer 'scale' was written between forward and backward"));
}

/// Writes what an operator before has saved.
struct OverwriterImpl : nn::Module {
  using Between = std::function<at::Tensor(at::Tensor)>;
  explicit OverwriterImpl(Between between) : w1(8, 8), w2(8, 8), between(std::move(between)) {
    register_module("w1", w1);
    register_module("w2", w2);
  }
  at::Tensor forward(const at::Tensor& x) { return w2(between(w1(x))); }
  nn::Linear w1, w2;
  Between between;
};
TESSERA_MODULE(Overwriter);

TEST(Recompute, ATensorChangedInPlaceInsideIsRefusedAsWithoutRecomputation) {
  const std::vector<std::pair<OverwriterImpl::Between, bool>> cases{
      {[](const at::Tensor& h) { return at::sigmoid(h).mul_(2); }, false},
      {[](const at::Tensor& h) {
         const at::Tensor out = at::gelu(h);
         h.add_(1);
         return out;
       },
       false},
      {[](const at::Tensor& h) { return at::softmax(h, -1).add_(1); }, false},
      {[](const at::Tensor& h) { return at::add(h, 1).relu_(); }, true},
      {[](const at::Tensor& h) { return at::gelu(h).add_(1); }, true},
  };
  for (const auto& [between, is_right] : cases) {
    for (const bool recomputed : {false, true}) {
      Overwriter module(between);
      torch::nn::Module root("root");
      root.register_module("inner", module);
      nn::assign_paths(root);
      const Attachment attached = recomputed ? recompute(root, {.modules = "inner"}) : Attachment();
      const at::Tensor loss = module(input()).sum();
      if (is_right) {
        loss.backward();
      } else if (recomputed) {
        EXPECT_THAT(refusal([&] { loss.backward(); }), HasSubstr("was changed in place after it was saved"));
      } else {
        EXPECT_THROW(loss.backward(), c10::Error);
      }
    }
  }
}

/// Catches all that is thrown, whatever it is.
struct SwallowingImpl : nn::Module {
  SwallowingImpl() : first(8, 8), fallback(8, 8) {
    register_module("first", first);
    register_module("fallback", fallback);
  }
  at::Tensor forward(const at::Tensor& x) {
    at::Tensor y = x;
    try {
      y = at::tanh(first(x));
    } catch (...) {
      if (saves_on) y = at::gelu(fallback(x));
    }
    return y + x;
  }
  nn::Linear first, fallback;
  bool saves_on = true;
};
TESSERA_MODULE(Swallowing);

TEST(Recompute, SaysThatAForwardCaughtTheEndOfTheSecondPass) {
  for (const bool saves_on : {true, false}) {
    Swallowing module;
    module->saves_on = saves_on;
    torch::nn::Module root("root");
    root.register_module("inner", module);
    nn::assign_paths(root);
    const auto again = recompute(root, {.modules = "inner"});
    const at::Tensor loss = module(input()).sum();
    EXPECT_THAT(refusal([&] { loss.backward(); }), AllOf(HasSubstr("recompute 'inner'"), HasSubstr("caught an exception that was to pass")));
  }
}

TEST(Recompute, InterceptorsFurtherInRunAgainAndThoseFurtherOutDoNot) {
  struct Counting : nn::Interceptor {
    nn::Values call(nn::Module&, nn::Values inputs, const nn::Next& next) override {
      ++(nn::recomputing() ? again : first);
      return next(std::move(inputs));
    }
    int first = 0, again = 0;
  };
  Net net(2);
  const auto inner = std::make_shared<Counting>(), outer = std::make_shared<Counting>(), inside = std::make_shared<Counting>();
  const auto attached = nn::attach(*net, "layers.*", inner);
  const auto below = nn::attach(*net, "layers.*.w2", inside);
  const auto again = recompute(net);
  const auto later = nn::attach(*net, "layers.*", outer);
  run(net);
  EXPECT_EQ(inner->first, 2);
  EXPECT_EQ(inner->again, 2);
  EXPECT_EQ(inside->again, 2);
  EXPECT_EQ(outer->first, 2);
  EXPECT_EQ(outer->again, 0);
}

TEST(Recompute, AnExceptionInTheSecondPassComesOutAndLeavesNothingBehind) {
  Fickle fickle;
  fickle->change = [](const at::Tensor&) -> at::Tensor { throw std::runtime_error("out of luck"); };
  const auto again = recompute(fickle, {.modules = ""});
  const at::Tensor x = at::ones({2, 3}).requires_grad_();
  const at::Tensor loss = fickle(x).sum();
  EXPECT_THROW(loss.backward({}, /*retain_graph=*/true), std::runtime_error);
  EXPECT_FALSE(nn::recomputing());
  fickle->change = [](const at::Tensor& y) { return (y * y).sin(); };
  loss.backward();
  EXPECT_TRUE(x.grad().defined());
}

/// Beside its output, something large that somebody else may hold.
struct AsideImpl : nn::Module {
  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor large = x.repeat({64, 1}).exp();
    if (fails) throw std::runtime_error("out of luck");
    aside = large;
    return x.exp();
  }
  at::Tensor aside;
  bool fails = false;
};
TESSERA_MODULE(Aside);

TEST(Recompute, ASecondPassLeavesNoMoreThanBackwardNeeds) {
  for (const bool fails : {false, true}) {
    MemoryTracker tracker;
    const TrackMemory track(tracker);
    Aside module;
    const auto again = recompute(module, {.modules = ""});
    const at::Tensor x = input().requires_grad_();
    at::Tensor loss = module(x).sum();
    if (fails) {
      loss = loss + module->aside.sum();
    } else {
      module->aside.reset();  // what was saved for it is needed no more
    }
    module->fails = fails;
    const int64_t before = tracker.current();
    if (fails) {
      EXPECT_THROW(loss.backward({}, /*retain_graph=*/true), std::runtime_error);
    } else {
      loss.backward({}, /*retain_graph=*/true);
      module->aside.reset();
      x.mutable_grad().reset();
    }
    EXPECT_LE(tracker.current(), before + 64) << (fails ? "broken off" : "complete");  // autograd may hold on to a scalar
  }
}

TEST(Recompute, RanksThatAreThreads) {
  Net reference(3);
  const Result plain = run(reference);
  std::vector<std::thread> ranks;
  std::mutex mutex;
  for (int r = 0; r < 4; ++r) {
    ranks.emplace_back([&] {
      Net net(3);
      const auto again = recompute(net);
      const Result mine = run(net);
      const std::lock_guard lock(mutex);
      expect_same_bits(mine, plain);
      EXPECT_EQ(net->calls(), 6);
    });
  }
  for (auto& rank : ranks) rank.join();
}

TEST(Recompute, APatternThatSeesNoCallIsNamedAtTheFirstBackward) {
  Net net(2);
  const auto attached = recompute(net, {.modules = "layers.*"});
  const at::Tensor x = input();
  const auto directly = [&](auto&& layer) { return refusal([&] { layer(layer(x)).sum().backward(); }); };
  EXPECT_THAT(directly([&](const at::Tensor& h) { return net->layers[1]->forward(h); }),
              AllOf(HasSubstr("recompute.modules = layers.*: 'layers.1'"), HasSubstr("`layer(x)` for `layer->forward(x)`")));
  torch::nn::AnyModule any(net->layers[0].ptr());
  EXPECT_THAT(directly([&](const at::Tensor& h) { return any.forward(h); }), HasSubstr("'layers.0'"));
  net(x).sum().backward();
  EXPECT_EQ(directly([&](const at::Tensor& h) { return net->layers[1]->forward(h); }), "not refused");
}

TEST(Recompute, AModelOnTheStack) {
  NetImpl net(2), plain(2);
  const auto attached = recompute(net, {.modules = "layers.*"});
  const at::Tensor x = input();
  const nn::SampleScope sample({.seed = 5, .step = 2});
  net.forward(x).sum().backward();
  plain.forward(x).sum().backward();
  EXPECT_EQ(net.layers[0]->calls, 2);
  for (size_t i = 0; i < net.parameters().size(); ++i) EXPECT_TRUE(at::equal(net.parameters()[i].grad(), plain.parameters()[i].grad()));
  const auto whole = recompute(plain, {.modules = ""});
  nn::call(plain, x).sum().backward();
  EXPECT_EQ(plain.layers[0]->calls, 3);
}

TEST(Recompute, RefusesWhatDoesNotFit) {
  Net net(2);
  const auto of = [&](const RecomputeOptions& options) { return refusal([&] { (void)recompute(net, options); }); };
  EXPECT_THAT(of({.modules = "layer.*"}), AllOf(HasSubstr("layer.*"), HasSubstr("nearest")));
  EXPECT_THAT(of({.every = 0}), HasSubstr("recompute.every = 0"));
  EXPECT_THAT(of({.budget_bytes = -1}), HasSubstr("recompute.budget_bytes = -1"));
  EXPECT_THAT(of({.budget_bytes = 10}), HasSubstr("needs an example"));
  EXPECT_THAT(of({.keep = {"mm"}}), HasSubstr("set recompute.mode = selective (RecomputeOptions{.mode = RecomputeMode::Selective})"));
  EXPECT_THAT(of({.mode = RecomputeMode::Selective}), HasSubstr("no attention core"));
  EXPECT_THAT(of({.mode = RecomputeMode::Selective, .keep = {"geluu"}}), AllOf(HasSubstr("'aten::geluu'"), HasSubstr("did you mean 'aten::gelu'")));
  EXPECT_THAT(of({.mode = RecomputeMode::Selective, .keep = {"linear"}}), HasSubstr("is made of other operators"));
  EXPECT_THAT(of({.mode = RecomputeMode::Selective, .keep = {"aten::view"}}), HasSubstr("no tensor of its own"));
  EXPECT_THAT(of({.mode = RecomputeMode::Selective, .keep = {"aten::native_dropout"}}), HasSubstr("draws random numbers"));
  torch::nn::ModuleList plain(torch::nn::BatchNorm1d(4));
  EXPECT_THAT(refusal([&] { (void)recompute(*plain, {.modules = "0"}); }), HasSubstr("cannot be intercepted"));
}

}  // namespace
}  // namespace tessera
