#include <gmock/gmock.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/nn.h>

#include "tessera/nn/attach.h"
#include "tessera/nn/layers.h"
#include "tessera/nn/meta.h"
#include "tessera/nn/operator_watch.h"
#include "tessera/nn/sequential.h"
#include "tests/pipeline/split_support.h"
#include "tests/test_device.h"

/// Modules that announce their calls: one node each, with exact ends, whatever they do inside.
namespace tessera {
namespace {

using namespace testing_support;
using enum pipeline::SplitPoint;
using ::testing::HasSubstr;

struct Tripled : torch::autograd::Function<Tripled> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x, const at::Tensor& weight) {
    context->save_for_backward({x, weight});
    return x * weight * 3;
  }
  static torch::autograd::tensor_list backward(torch::autograd::AutogradContext* context, torch::autograd::tensor_list gradients) {
    const auto saved = context->get_saved_variables();
    return {gradients[0] * saved[1] * 3, (gradients[0] * saved[0] * 3).sum(0)};
  }
};

/// An autograd Function, a table that is filled by hand, a host that reads a value, and a mode that is asked in each call.
struct BlockImpl : nn::Module {
  BlockImpl() : fc(4, 4) {
    register_module("fc", fc);
    weight = register_parameter("weight", at::ones({4}));
  }
  at::Tensor forward(const at::Tensor& x, const std::optional<at::Tensor>& scale) {
    at::Tensor y = Tripled::apply(fc(x), weight) * torch::tensor({1.f, 2.f, 3.f, 4.f});
    ++calls;
    if (y.sum().item<double>() > 0) y = y / 2;
    const at::Tensor sums = torch::zeros({y.size(0), 4});
    sums.add_(y);
    y = sums;
    if (scale) y = y * *scale;
    return is_training() ? y : y + 1;
  }
  nn::Linear fc;
  at::Tensor weight;
  int calls = 0;
};
TESSERA_MODULE(Block);

struct StackImpl : nn::Module {
  StackImpl() : head(4, 2) {
    register_module("blocks", blocks);
    for (int i = 0; i < 3; ++i) blocks->push_back(Block());
    register_module("norm", norm);
    register_module("head", head);
  }
  at::Tensor forward(const at::Tensor& x) {
    at::Tensor y = x;
    const at::Tensor scale = x.abs().mean();
    for (const auto& block : *blocks) y = y + nn::call(*block->as<BlockImpl>(), y, std::optional(scale));
    return head(norm(y));
  }
  torch::nn::ModuleList blocks;
  nn::RMSNorm norm{4, 1e-5};
  torch::nn::Linear head;
};
TESSERA_MODULE(Stack);

std::vector<std::string> names_of(const pipeline::SplitModel& split, int stage) {
  std::vector<std::string> names;
  const auto recording = split.recording();
  const auto& plan = recording->stages.stages[static_cast<size_t>(stage)];
  for (int i = plan.begin; i < plan.end; ++i) {
    const auto& node = recording->graph->nodes[static_cast<size_t>(i)];
    names.push_back(node.call ? node.path : node.name);
  }
  return names;
}

TEST(SplitModules, CallsAreNodesWithExactEnds) {
  torch::manual_seed(1);
  const auto split = expect_split_equals_whole(Stack(), {torch::randn({3, 4})}, {{"blocks.1", Beginning}, {"norm", Beginning}});
  EXPECT_EQ(names_of(split, 0), (std::vector<std::string>{"abs", "mean", "blocks.0", "add"}));
  EXPECT_EQ(names_of(split, 1), (std::vector<std::string>{"blocks.1", "add", "blocks.2", "add"}));
  EXPECT_EQ(names_of(split, 2), (std::vector<std::string>{"norm", "t", "addmm"}));
}

TEST(SplitModules, EndIsBehindTheCall) {
  torch::manual_seed(1);
  const auto split = expect_split_equals_whole(Stack(), {torch::randn({3, 4})}, {{"blocks.0", End}});
  EXPECT_EQ(names_of(split, 0), (std::vector<std::string>{"abs", "mean", "blocks.0"}));
}

TEST(SplitModules, OnMetaEachStageDrawsItsOwnValues) {
  const std::vector<at::Tensor> inputs{at::randn({3, 4}, at::detail::createCPUGenerator(1))};
  auto whole = on_meta([] { return Stack(); });
  materialize(*whole, 9, testing_support::test_device());
  auto model = on_meta([] { return Stack(); });
  const auto split = pipeline::split(model, inputs, {{"blocks.1", Beginning}, {"norm", Beginning}});
  for (int s = 0; s < split.stages(); ++s) materialize(*split.module(s), 9, testing_support::test_device());
  const auto expected = run_pass(*whole, [&] { return eager(forward_of(whole), inputs); });
  expect_same(run_pass(*model, [&] { return staged(split, inputs); }), expected);
}

/// Wrappers keep no module alive, so what is made of `*split.module(0)` would be left with one that is gone.
TEST(SplitModules, AStageIsOneModuleAndTheSplitModels) {
  auto split = std::optional(pipeline::split(Stack(), {torch::randn({3, 4})}, {{"blocks.1", Beginning}, {"norm", Beginning}}));
  const std::weak_ptr<torch::nn::Module> one = split->module(1), both = split->module({0, 1});
  EXPECT_FALSE(one.expired());
  EXPECT_EQ(split->module(1), one.lock());
  EXPECT_EQ(split->module({1, 0, 1}), both.lock());
  EXPECT_NE(one.lock(), both.lock());
  const auto copy = split;
  split.reset();
  EXPECT_FALSE(one.expired());
}

/// What is attached later is passed by each replay.
TEST(SplitModules, InterceptorsArePassed) {
  struct Doubles final : nn::Interceptor {
    nn::Values call(nn::Module&, nn::Values inputs, const nn::Next& next) override {
      nn::Values outputs = next(std::move(inputs));
      outputs[0] = outputs[0].toTensor() * 2;
      return outputs;
    }
  };
  torch::manual_seed(1);
  Stack model;
  const std::vector<at::Tensor> inputs{torch::randn({3, 4})};
  const auto split = pipeline::split(model, inputs, {{"blocks.1", Beginning}});
  const auto plain = run_pass(*model, [&] { return staged(split, inputs); });
  const auto attached = nn::attach(*model, "blocks.*", std::make_shared<Doubles>());
  const auto doubled = run_pass(*model, [&] { return staged(split, inputs); });
  EXPECT_FALSE(at::equal(plain.outputs[0], doubled.outputs[0]));
  expect_same(doubled, run_pass(*model, [&] { return eager(forward_of(model), inputs); }));
}

/// Who watches operators for another reason sees those of a recording, of which the first of a mode is made twice, and of each replay.
TEST(SplitModules, OtherWatchersSeeThePass) {
  struct Names final : nn::OperatorWatcher {
    void before(const c10::OperatorHandle& op, torch::jit::Stack&) override { seen.push_back(op.schema().name()); }
    std::vector<std::string> seen;
  };
  const auto names = std::make_shared<Names>();
  const std::vector<at::Tensor> inputs{torch::randn({3, 4})};
  torch::nn::Sequential model(torch::nn::Linear(4, 4), torch::nn::ReLU());
  nn::OperatorWatch watch(names);
  watch.wake();
  const auto split = pipeline::split(model, inputs, {});
  const std::vector<std::string> expected{"aten::t", "aten::addmm", "aten::relu"};
  std::vector<std::string> of_recording = names->seen;
  std::erase_if(of_recording, [](const std::string& name) { return name.starts_with("aten::empty"); });
  EXPECT_EQ(of_recording, (std::vector<std::string>{"aten::t", "aten::addmm", "aten::relu", "aten::t", "aten::addmm", "aten::relu"}));
  pipeline::TracedStage stage(split, 0, [&](int) { return inputs; });
  names->seen.clear();
  stage.forward(0, {});
  EXPECT_EQ(names->seen, expected);
}

TEST(SplitModules, ASplitInsideLooksIntoTheModule) {
  torch::manual_seed(1);
  // The Function of the block that is looked into is met by itself.
  EXPECT_THAT(refusal([] { pipeline::split(Stack(), {torch::randn({3, 4})}, {{"blocks.1.fc", Beginning}}); }),
              HasSubstr("has made of what an operator gave; neither a torch::autograd::Function nor"));
}

/// Equilibrium layers solve for their gradient in a hook, energies are differentiated for their forces; ids become columns.
struct ImplicitImpl : nn::Module {
  ImplicitImpl() : fc(4, 4) { register_module("fc", fc); }
  at::Tensor forward(const at::Tensor& x) {
    at::Tensor y = fc(x);
    if (y.requires_grad()) y.register_hook([](const at::Tensor& gradient) { return gradient * 2; });
    return y;
  }
  nn::Linear fc;
};
TESSERA_MODULE(Implicit);

struct HookedNet : torch::nn::Module {
  HookedNet() {
    register_module("in", in);
    register_module("implicit", implicit);
    register_module("out", out);
  }
  at::Tensor forward(const at::Tensor& ids) {
    const at::Tensor h = implicit(in(torch::one_hot(ids, 5).to(at::kFloat)));
    const auto hook = [&] {
      if (h.requires_grad()) h.register_hook([](const at::Tensor& gradient) { return gradient * 2; });
    };
    if (hooks_outside == Outside::BeforeUse) hook();
    const at::Tensor y = out(h);
    if (hooks_outside == Outside::BehindUse) hook();
    return y;
  }
  enum class Outside { Never, BeforeUse, BehindUse } hooks_outside = Outside::Never;
  torch::nn::Linear in{5, 4};
  Implicit implicit;
  torch::nn::Linear out{4, 2};
};

TEST(SplitModules, AModuleMayHookWhatItReturns) {
  const std::vector<at::Tensor> inputs{torch::arange(5)};
  for (const char* at : {"implicit", "out"}) {
    torch::manual_seed(1);
    const auto model = std::make_shared<HookedNet>();
    const auto split = pipeline::split(model, inputs, {{at, Beginning}});
    expect_same(run_pass(*model, [&] { return staged(split, inputs); }), run_pass(*model, [&] { return eager(forward_of(model), inputs); }));
  }
  for (const auto when : {HookedNet::Outside::BeforeUse, HookedNet::Outside::BehindUse}) {
    const auto outside = std::make_shared<HookedNet>();
    outside->hooks_outside = when;
    EXPECT_THAT(refusal([&] { pipeline::split(outside, inputs, {{"out", Beginning}}); }), HasSubstr("hook (register_hook)"));
  }
}

struct HooksItsInputImpl : nn::Module {
  HooksItsInputImpl() : fc(4, 4) { register_module("fc", fc); }
  at::Tensor forward(const at::Tensor& x) {
    if (x.requires_grad()) x.register_hook([](const at::Tensor& gradient) { return gradient.clamp(-0.1, 0.1); });
    return fc(x);
  }
  nn::Linear fc;
};
TESSERA_MODULE(HooksItsInput);

struct HookedInputNet : torch::nn::Module {
  enum class Others { None, Looking, WrittenBefore, Before, Behind };
  explicit HookedInputNet(Others others = Others::None) : others(others) {
    register_module("in", in);
    register_module("hooked", hooked);
    register_module("out", out);
  }
  at::Tensor forward(const at::Tensor& x) {
    at::Tensor h = in(x), other = h;
    if (others == Others::Looking) other = h.detach().abs();
    if (others == Others::WrittenBefore) h.relu_();
    if (others == Others::Before) other = torch::tanh(h);
    const at::Tensor y = out(hooked(h));
    if (others == Others::Behind) other = torch::tanh(h);
    return others == Others::None || others == Others::WrittenBefore ? y : y + other.sum();
  }
  Others others;
  torch::nn::Linear in{5, 4};
  HooksItsInput hooked;
  torch::nn::Linear out{4, 2};
};

TEST(SplitModules, AModuleMayHookWhatItIsGiven) {
  using enum HookedInputNet::Others;
  torch::manual_seed(1);
  const std::vector<at::Tensor> inputs{torch::randn({3, 5})};
  for (const auto others : {None, Looking, WrittenBefore}) {
    for (const char* at : {"hooked", "out"}) {
      torch::manual_seed(1);
      const auto model = std::make_shared<HookedInputNet>(others);
      const auto split = pipeline::split(model, inputs, {{at, Beginning}});
      expect_same(run_pass(*model, [&] { return staged(split, inputs); }), run_pass(*model, [&] { return eager(forward_of(model), inputs); }));
    }
  }
  for (const auto& [others, message] : {std::pair(Before, "hooks a tensor that it was given (register_hook), and others"), {Behind, "hook (register_hook)"}}) {
    const auto model = std::make_shared<HookedInputNet>(others);
    EXPECT_THAT(refusal([&] { pipeline::split(model, inputs, {{"hooked", Beginning}}); }), HasSubstr(message));
  }
}

struct TiedHeadImpl : nn::Module {
  at::Tensor forward(const at::Tensor& x, const at::Tensor& weight) { return x.matmul(weight.t()); }
};
TESSERA_MODULE(TiedHead);

/// The hook was there before the call.
TEST(SplitModules, AModuleMayBeGivenWhatHasAHook) {
  struct Net : torch::nn::Module {
    Net() {
      register_module("fc", fc);
      register_module("head", head);
      fc->weight.register_hook([](const at::Tensor& grad) { return grad.clamp(-0.1, 0.1); });
    }
    at::Tensor forward(const at::Tensor& x) { return head(fc(x), fc->weight); }
    torch::nn::Linear fc{5, 5};
    TiedHead head;
  };
  const auto model = std::make_shared<Net>();
  EXPECT_EQ(pipeline::split(model, {torch::randn({3, 5})}, {}).stages(), 1);
}

struct DrawnImpl : nn::Module {
  at::Tensor forward(int64_t rows) { return torch::randn({rows, 4}); }
};
TESSERA_MODULE(Drawn);

struct NoisyImpl : nn::Module {
  NoisyImpl() : a(4, 4), b(4, 4) {
    register_module("noise", noise);
    register_module("a", a);
    register_module("b", b);
  }
  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor noise_of_pass = noise(x.size(0));
    return b(a(x) + noise_of_pass) - noise_of_pass;
  }
  Drawn noise;
  torch::nn::Linear a, b;
};
TESSERA_MODULE(Noisy);

/// Made again by another stage it would be other noise.
TEST(SplitModules, WhatAModuleDrawsCrosses) {
  Noisy model;
  nn::assign_paths(*model);
  const auto split = pipeline::split(model, {torch::ones({3, 4})}, {{"b", Beginning}});
  EXPECT_EQ(split.crossings().size(), 2u);
}

}  // namespace
}  // namespace tessera
