#include <gmock/gmock.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/nn.h>

#include "tessera/comm/testing.h"
#include "tessera/nn/attach.h"
#include "tessera/nn/layers.h"
#include "tessera/nn/meta.h"
#include "tessera/nn/operator_watch.h"
#include "tessera/nn/sample_scope.h"
#include "tessera/nn/sequential.h"
#include "tests/pipeline/split_support.h"
#include "tests/test_device.h"

/// Modules that announce their calls: one node each, with exact ends, whatever they do inside.
namespace tessera {
namespace {

using namespace testing_support;
using enum pipeline::SplitPoint;
using ::testing::AllOf;
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
  const pipeline::SplitSpec hooked{{"hooked", Beginning}}, out{{"out", Beginning}}, both{{"hooked", Beginning}, {"out", Beginning}};
  for (const auto others : {None, Looking, WrittenBefore, Behind}) {
    for (const auto& splits : {hooked, out, both}) {
      torch::manual_seed(1);
      const auto model = std::make_shared<HookedInputNet>(others);
      const auto split = pipeline::split(model, inputs, splits);
      expect_same(run_pass(*model, [&] { return staged(split, inputs); }), run_pass(*model, [&] { return eager(forward_of(model), inputs); }));
    }
  }
  EXPECT_THAT(refusal([&] { pipeline::split(std::make_shared<HookedInputNet>(Before), inputs, hooked); }),
              HasSubstr("hooks a tensor that it was given (register_hook, retain_grad), and others"));
}

/// Gives back what it is given, hooked; or writes into it, behind which its hook is the old history's.
struct GivesBackImpl : nn::Module {
  enum class And { Nothing, Hooks, HooksAndWrites, Retains };
  explicit GivesBackImpl(And what) : what(what) {}
  at::Tensor forward(const at::Tensor& x) {
    if (x.requires_grad() && (what == And::Hooks || what == And::HooksAndWrites)) {
      x.register_hook([](const at::Tensor& gradient) { return gradient.clamp(-0.1, 0.1); });
    }
    if (x.requires_grad() && what == And::Retains) {
      x.retain_grad();
      retained = x;
    }
    return what == And::HooksAndWrites ? x.relu_() * 2 : x;
  }
  And what;
  at::Tensor retained;
};
TESSERA_MODULE(GivesBack);

struct GivesBackNet : torch::nn::Module {
  explicit GivesBackNet(GivesBackImpl::And what, bool others = false) : others(others), gives_back(what) {
    register_module("in", in);
    register_module("gives_back", gives_back);
    register_module("mid", mid);
    register_module("out", out);
    register_module("last", last);
  }
  at::Tensor forward(const at::Tensor& x) {
    at::Tensor h = in(x);
    const at::Tensor other = others ? torch::tanh(h) : at::Tensor();
    h = gives_back(h);
    const at::Tensor y = torch::tanh(mid(h));
    return out(others ? y + other : y) + last(torch::tanh(h));
  }
  bool others;
  torch::nn::Linear in{5, 4};
  GivesBack gives_back;
  torch::nn::Linear mid{4, 4}, out{4, 2}, last{4, 2};
};
const pipeline::SplitSpec kAroundGivesBack{{"gives_back", Beginning}, {"out", Beginning}};

/// The skip over the last cut, too, brings its gradient back through the hook.
TEST(SplitModules, AModuleMayHookWhatItIsGivenAndGiveItBack) {
  const std::vector<at::Tensor> inputs{at::randn({3, 5}, at::detail::createCPUGenerator(1))};
  for (const auto what : {GivesBackImpl::And::Hooks, GivesBackImpl::And::HooksAndWrites}) {
    torch::manual_seed(1);
    const auto model = std::make_shared<GivesBackNet>(what);
    const auto split = pipeline::split(model, inputs, kAroundGivesBack);
    const auto expected = run_pass(*model, [&] { return eager(forward_of(model), inputs); });
    for (int pass = 0; pass < 2; ++pass) expect_same(run_pass(*model, [&] { return staged(split, inputs); }), expected);
  }
}

TEST(SplitModules, AModuleMayRetainTheGradientOfWhatItIsGiven) {
  using enum GivesBackImpl::And;
  const std::vector<at::Tensor> inputs{at::randn({3, 5}, at::detail::createCPUGenerator(1))};
  torch::manual_seed(1);
  const auto model = std::make_shared<GivesBackNet>(Retains);
  const auto split = pipeline::split(model, inputs, kAroundGivesBack);
  eager(forward_of(model), inputs);
  const at::Tensor expected = model->gives_back->retained.grad().clone();
  staged(split, inputs);
  EXPECT_TRUE(at::equal(model->gives_back->retained.grad(), expected));
  EXPECT_THAT(refusal([&] { pipeline::split(std::make_shared<GivesBackNet>(Retains, true), inputs, kAroundGivesBack); }),
              HasSubstr("(register_hook, retain_grad), and others"));
}

/// Which is handed on where it is recorded: a hook that comes later would be called with a part of the gradient, unless this stage sees all of it.
TEST(SplitModules, WhatAModuleHooksInSomePassesAloneIsRefusedWhereOtherStagesUseIt) {
  using enum GivesBackImpl::And;
  const std::vector<at::Tensor> inputs{at::randn({3, 5}, at::detail::createCPUGenerator(1))};
  const auto hook_later = [&](const pipeline::SplitSpec& splits, bool others = false) {
    torch::manual_seed(1);
    const auto model = std::make_shared<GivesBackNet>(Nothing, others);
    const auto split = pipeline::split(model, inputs, splits);
    model->gives_back->what = Hooks;
    expect_same(run_pass(*model, [&] { return staged(split, inputs); }), run_pass(*model, [&] { return eager(forward_of(model), inputs); }));
  };
  EXPECT_THAT(refusal([&] { hook_later(kAroundGivesBack); }), HasSubstr("the call of 'gives_back' (GivesBack) hooks a tensor that it was given"));
  EXPECT_THAT(refusal([&] { hook_later({{"gives_back", Beginning}}, /*others=*/true); }), HasSubstr("hooks a tensor that it was given"));
  hook_later({{"gives_back", Beginning}});
  hook_later({{"out", Beginning}});
}

/// A skip goes through the stage that hooks it, so ranks that hook differently would wait for each other.
TEST(SplitModules, RanksThatHookDifferentlyAreRefused) {
  const auto agree = [](int lookers) {
    comm::run_ranks(3, [&](comm::World& world) {
      const auto what = world.rank() < lookers ? GivesBackImpl::And::Hooks : GivesBackImpl::And::Nothing;
      pipeline::split(std::make_shared<GivesBackNet>(what), {at::ones({3, 5})}, kAroundGivesBack).check_agreement(world.group());
    });
  };
  agree(0);
  agree(3);
  EXPECT_THAT(refusal([&] { agree(1); }), HasSubstr("let modules hook what they are given on all ranks or on none"));
}

TEST(SplitModules, WhatAModuleHooksMayBeWrittenThroughAView) {
  struct Net : HookedNet {
    at::Tensor forward(const at::Tensor& x) {
      const at::Tensor h = implicit(fc(x)), y = mid(torch::tanh(x));
      h.view({-1}).mul_(2);
      return out(h * y);
    }
    torch::nn::Linear fc{5, 4}, mid{5, 4};
    Net() {
      register_module("fc", fc);
      register_module("mid", mid);
    }
  };
  const std::vector<at::Tensor> inputs{at::randn({3, 5}, at::detail::createCPUGenerator(1))};
  torch::manual_seed(1);
  const auto model = std::make_shared<Net>();
  const auto split = pipeline::split(model, inputs, {{"mid", Beginning}});
  expect_same(run_pass(*model, [&] { return staged(split, inputs); }), run_pass(*model, [&] { return eager(forward_of(model), inputs); }));
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

/// A temperature that falls with each pass, and rows that are looked at in turns.
struct TurnsImpl : nn::Module {
  enum class What { Number, Product, View, Parts, WithNone };
  explicit TurnsImpl(What what) : what(what) {
    if (what == What::Product || what == What::Parts) register_module("fc", fc);
  }
  std::vector<at::Tensor> forward(const std::optional<at::Tensor>& x) {
    ++passes;
    if (what == What::View) return {x->narrow(0, passes % 2, 2)};
    const at::Tensor temperature = torch::full({1}, 1.0 / passes);
    if (what == What::WithNone) return {*x * temperature, at::Tensor()};
    if (what == What::Parts) return (fc(*x) * temperature).split({1, 3}, -1);
    return {x ? fc(*x) * temperature : temperature};
  }
  What what;
  int passes = 0;
  torch::nn::Linear fc{4, 4};
};
TESSERA_MODULE(Turns);

struct TurnsNet : torch::nn::Module {
  explicit TurnsNet(TurnsImpl::What what) : turns(what) {
    register_module("a", a);
    register_module("turns", turns);
    register_module("b", b);
  }
  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor h = a(x);
    if (turns->what == TurnsImpl::What::Number) {
      const at::Tensor t = turns(std::nullopt)[0];
      return b(h * t) * t;
    }
    const std::vector<at::Tensor> parts = turns(h);
    if (turns->what == TurnsImpl::What::Parts) return b(parts[1].sum(-1, true) * h) + parts[0];
    const at::Tensor& t = parts[0];
    return b(t.relu_() * 2) + t;
  }
  torch::nn::Linear a{4, 4};
  Turns turns;
  torch::nn::Linear b{4, 4};
};

/// One call a pass, wherever its result is used, and none to see whether the pass is still the same.
TEST(SplitModules, AModuleMayCountItsCalls) {
  using enum TurnsImpl::What;
  const std::vector<at::Tensor> inputs{at::randn({3, 4}, at::detail::createCPUGenerator(1))};
  for (const auto what : {Number, Product, View, Parts, WithNone}) {
    torch::manual_seed(1);
    const auto model = std::make_shared<TurnsNet>(what);
    const auto split = pipeline::split(model, inputs, {{"b", Beginning}});
    for (int step = 0; step < 5; ++step) {
      model->turns->passes = step;
      const auto expected = run_pass(*model, [&] { return eager(forward_of(model), inputs); });
      model->turns->passes = step;
      expect_same(run_pass(*model, [&] { return staged(split, inputs); }), expected);
      EXPECT_EQ(model->turns->passes, step + 1);
    }
  }
}

/// A cast to another type is a copy, however its argument lies.
TEST(SplitModules, WhatIsCastMayLieOtherwiseThanTheExample) {
  struct Pixels : torch::nn::Module {
    Pixels() {
      register_module("a", a);
      register_module("b", b);
    }
    at::Tensor forward(const at::Tensor& x) { return b(at::relu(a(x.to(at::kFloat).div_(255)))); }
    torch::nn::Linear a{4, 4}, b{4, 4};
  };
  torch::manual_seed(1);
  const auto model = std::make_shared<Pixels>();
  const auto split = pipeline::split(model, {at::zeros({4, 4}, at::kByte)}, {{"b", Beginning}});
  for (const at::Tensor& batch : {at::arange(16, at::kByte).view({4, 4}).t(), at::arange(24, at::kByte).view({4, 6}).narrow(1, 1, 4)}) {
    expect_same(run_pass(*model, [&] { return staged(split, {batch}); }), run_pass(*model, [&] { return eager(forward_of(model), {batch}); }));
  }
}

/// Such a pass that finds another one runs them all, before it is refused.
TEST(SplitModules, WhatAModuleLeavesInAMemberIsThatOfTheShapes) {
  struct LengthImpl : nn::Module {
    at::Tensor forward(const at::Tensor& x) {
      rows = x.size(0);
      return x * 2;
    }
    int64_t rows = 0;
  };
  struct Net : torch::nn::Module {
    Net() {
      register_module("a", a);
      register_module("length", length.ptr());
      register_module("b", b);
    }
    at::Tensor forward(const at::Tensor& x) {
      const at::Tensor h = length(a(x));
      return b(h) * static_cast<double>(length->rows);
    }
    torch::nn::Linear a{4, 4}, b{4, 4};
    nn::ModuleHolder<LengthImpl> length{std::make_shared<LengthImpl>()};
  };
  torch::manual_seed(1);
  const auto model = std::make_shared<Net>();
  const auto split = pipeline::split(model, {torch::randn({3, 4})}, {{"b", Beginning}});
  for (int step = 0; step < 5; ++step) {
    for (const int64_t rows : {3, 2}) {
      const std::vector<at::Tensor> inputs{at::randn({rows, 4}, at::detail::createCPUGenerator(1))};
      expect_same(run_pass(*model, [&] { return staged(split, inputs); }), run_pass(*model, [&] { return eager(forward_of(model), inputs); }));
    }
  }
}

/// Behind some passes it gives something else than when it was recorded.
struct ChangesImpl : nn::Module {
  enum class What { GivesBack, TwoInPlaceOfOne, ShorterList, LongerList, TensorForNone, NoneForTensor, OtherSizes, OtherDtype, OwnRows, TakesGradient };
  explicit ChangesImpl(What what) : what(what) {}
  std::tuple<std::vector<at::Tensor>, std::optional<at::Tensor>> forward(const at::Tensor& x) {
    switch (what) {
      case What::GivesBack:
        return {{changed ? x.round() : x}, std::nullopt};
      case What::TwoInPlaceOfOne: {
        const at::Tensor y = x * 2;
        return {{y, changed ? y.round() : y}, std::nullopt};
      }
      case What::ShorterList:
        return {changed ? std::vector{x * 2} : std::vector{x * 2, x * 3}, std::nullopt};
      case What::LongerList:
        return {changed ? std::vector{x * 2, x * 3} : std::vector{x * 2}, std::nullopt};
      case What::TensorForNone:
        return {{x * 2}, changed ? std::optional(x * 3) : std::nullopt};
      case What::NoneForTensor:
        return {{x * 2}, changed ? std::nullopt : std::optional(x * 3)};
      case What::OtherSizes:
        return {{changed ? (x * 2).narrow(0, 0, 1) : x * 2}, std::nullopt};
      case What::OtherDtype:
        return {{x.to(changed ? at::kBFloat16 : at::kHalf)}, std::nullopt};
      case What::OwnRows:
        return {{changed ? x * 2 : x.mean(0, true).expand_as(x)}, std::nullopt};
      case What::TakesGradient:
        return {{changed ? x * 2 : x.detach() * 2}, std::nullopt};
    }
    return {};
  }
  What what;
  bool changed = false;
};
TESSERA_MODULE(Changes);

struct ChangesNet : torch::nn::Module {
  explicit ChangesNet(ChangesImpl::What what, bool skips) : skips(skips), changes(what) {
    register_module("a", a);
    register_module("changes", changes);
    register_module("b", b);
    register_module("c", c);
  }
  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor h = torch::tanh(a(x));
    const auto [list, more] = changes(h);
    at::Tensor y = list[0];
    for (size_t i = 1; i < list.size(); ++i) y = y + list[i] * y;
    if (more) y = y + *more;
    y = torch::tanh(b(y.scalar_type() == at::kFloat ? y : y.to(at::kFloat)));
    return c(skips ? y + h : y);
  }
  bool skips;
  nn::Linear a{4, 4};
  Changes changes;
  nn::Linear b{4, 4}, c{4, 2};
};

TEST(SplitModules, AModuleThatGivesSomethingElseThanItWasRecordedWithIsRefused) {
  using enum ChangesImpl::What;
  const std::vector<at::Tensor> inputs{at::randn({3, 4}, at::detail::createCPUGenerator(1))};
  const auto change = [&](ChangesImpl::What what, bool skips, const pipeline::SplitSpec& splits) {
    torch::manual_seed(1);
    const auto model = std::make_shared<ChangesNet>(what, skips);
    const auto split = pipeline::split(model, inputs, splits);
    model->changes->changed = true;
    const auto expected = run_pass(*model, [&] { return eager(forward_of(model), inputs); });
    expect_same(run_pass(*model, [&] { return staged(split, inputs); }), expected);
  };
  const pipeline::SplitSpec one{{"b", Beginning}}, by_itself{{"changes", Beginning}, {"b", Beginning}}, last{{"c", Beginning}};
  for (const auto& splits : {one, by_itself, last}) {
    for (const auto what : {GivesBack, TwoInPlaceOfOne}) {
      EXPECT_THAT(refusal([&] { change(what, true, splits); }), HasSubstr("the call of 'changes' (Changes) gives two tensors where it was recorded with one"));
    }
  }
  for (const auto& [what, message] : {std::pair(ShorterList, "a list of 1 where it was recorded with a list of 2"),
                                      {LongerList, "a list of 2 where it was recorded with a list of 1"},
                                      {TensorForNone, "a tensor where it was recorded with no tensor"},
                                      {NoneForTensor, "no tensor where it was recorded with a tensor"},
                                      {OtherSizes, "a tensor of [1, 4] where it was recorded with [3, 4]"}}) {
    EXPECT_THAT(refusal([&] { change(what, false, one); }), HasSubstr(message));
  }
  // Where one alone uses it behind the call, in its stage.
  EXPECT_THAT(refusal([&] { change(GivesBack, false, by_itself); }), HasSubstr("gives two tensors where it was recorded with one"));
  change(GivesBack, false, last);
  // Where it crosses, or what it takes.
  const pipeline::SplitSpec behind{{"changes", End}}, before{{"changes", Beginning}};
  for (const auto& [what, message] : {std::pair(OtherDtype, "stage 0 sends what 'changes' gives, bfloat16 [3, 4], where it was recorded as float16 [3, 4]"),
                                      {OwnRows, "stage 0 sends what 'changes' gives, with rows of its own"},
                                      {TakesGradient, "stage 0 sends what 'changes' gives, with a gradient"}}) {
    EXPECT_THAT(refusal([&] { change(what, false, behind); }), HasSubstr(message));
    change(what, false, last);
  }
  EXPECT_THAT(refusal([&] { change(TakesGradient, false, before); }), HasSubstr("gives a tensor with a gradient where it was recorded with one that has none"));
  for (const auto what : {OtherDtype, OwnRows}) change(what, false, before);
}

TEST(SplitModules, ASampleScopeInsideOfThePassIsRefused) {
  struct OpensScope final : nn::Interceptor {
    nn::Values call(nn::Module&, nn::Values inputs, const nn::Next& next) override {
      nn::SampleContext here = nn::SampleScope::current();
      here.first_column += 3;
      const nn::SampleScope scope(here);
      return next(std::move(inputs));
    }
  };
  const std::vector<at::Tensor> inputs{torch::ones({3, 4})};
  const nn::SampleScope around({.seed = 1, .step = 3});
  const pipeline::SplitSpec splits{{"blocks.1", Beginning}};
  torch::manual_seed(1);
  Stack model;
  const auto of_blocks = nn::attach(*model, "blocks.*", std::make_shared<OpensScope>());
  expect_split_equals_whole(model, inputs, splits);
  const auto of_all = nn::attach(*model, std::make_shared<OpensScope>());
  EXPECT_THAT(refusal([&] { pipeline::split(model, inputs, splits); }),
              AllOf(HasSubstr("the call of 'blocks.0' (Block) is made in a SampleScope"), HasSubstr("open it around the pass")));
}

/// Made again by another stage it would be other noise.
TEST(SplitModules, WhatAModuleDrawsCrosses) {
  Noisy model;
  nn::assign_paths(*model);
  const auto split = pipeline::split(model, {torch::ones({3, 4})}, {{"b", Beginning}});
  EXPECT_EQ(split.crossings().size(), 2u);
}

}  // namespace
}  // namespace tessera
