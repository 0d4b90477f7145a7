#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/any.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>

#include "tessera/core/error.h"
#include "tessera/nn/attach.h"
#include "tessera/nn/calls.h"
#include "tessera/nn/linear.h"
#include "tessera/nn/meta.h"
#include "tessera/nn/parameter.h"
#include "tessera/nn/sequential.h"
#include "tests/refusal.h"
#include "tests/test_device.h"

namespace tessera::nn {
namespace {

using namespace testing_support;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

/// Writes its name on the way in and on the way out.
struct Tracer : Interceptor {
  Tracer(std::string name, std::vector<std::string>& log) : name(std::move(name)), log(log) {}
  Values call(Module&, Values inputs, const Next& next) override {
    log.push_back("+" + name);
    Values outputs = next(std::move(inputs));
    log.push_back("-" + name);
    return outputs;
  }
  std::string name;
  std::vector<std::string>& log;
};

/// A module whose forward takes and returns every kind of value.
struct Handle : torch::CustomClassHolder {
  int64_t uses = 0;
};
struct ManyImpl : Module {
  std::tuple<at::Tensor, std::optional<at::Tensor>, int64_t> forward(const at::Tensor& x, const std::optional<at::Tensor>& maybe,
                                                                     const std::vector<at::Tensor>& list, int times, double scale, bool negate,
                                                                     const std::string& name, const std::vector<int64_t>& sizes,
                                                                     const c10::intrusive_ptr<Handle>& handle, std::optional<int64_t> extra = 5) {
    at::Tensor sum = x * times * scale;
    for (const auto& each : list) sum = sum + each;
    if (negate) sum = -sum;
    if (handle) ++handle->uses;
    return {sum.reshape(sizes), maybe, static_cast<int64_t>(name.size()) + extra.value_or(100)};
  }
};
TESSERA_MODULE(Many);

struct BlockImpl : Module {
  BlockImpl() : w1(2, 2), w2(2, 2) {
    register_module("w1", w1);
    register_module("w2", w2);
  }
  at::Tensor forward(const at::Tensor& x) { return w2(w1(x)); }
  Linear w1, w2;
};
TESSERA_MODULE(Block);

struct NetImpl : Module {
  NetImpl() : layers(Block(), Block(), Block()) {
    register_module("layers", layers);
    register_module("plain", plain);
  }
  at::Tensor forward(const at::Tensor& x) { return x; }
  torch::nn::ModuleList layers;
  torch::nn::Linear plain{2, 2};
};
TESSERA_MODULE(Net);

TEST(Interceptor, LaterIsFurtherOut) {
  Linear linear(2, 2);
  std::vector<std::string> log;
  const auto a = attach(*linear, std::make_shared<Tracer>("a", log));
  const auto b = attach(*linear, std::make_shared<Tracer>("b", log));
  linear(at::ones({1, 2}));
  EXPECT_THAT(log, ElementsAre("+b", "+a", "-a", "-b"));
}

TEST(Interceptor, DetachesInAnyOrderAndOutlivesTheModule) {
  std::vector<std::string> log;
  Attachment last;
  {
    Linear linear(2, 2);
    auto a = attach(*linear, std::make_shared<Tracer>("a", log));
    auto b = attach(*linear, std::make_shared<Tracer>("b", log));
    auto c = attach(*linear, std::make_shared<Tracer>("c", log));
    b.detach();
    linear(at::ones({1, 2}));
    EXPECT_THAT(log, ElementsAre("+c", "+a", "-a", "-c"));
    a.detach();
    c.detach();
    EXPECT_FALSE(linear->intercepted());
    last = attach(*linear, std::make_shared<Tracer>("d", log));
  }
  last.detach();
}

TEST(Interceptor, OneAttachedTwiceLosesTheOutermostFirst) {
  Linear linear(2, 2);
  std::vector<std::string> log;
  auto twice = std::make_shared<Tracer>("t", log);
  auto first = attach(*linear, twice);
  auto middle = attach(*linear, std::make_shared<Tracer>("m", log));
  auto second = attach(*linear, twice);
  second.detach();
  linear(at::ones({1, 2}));
  EXPECT_THAT(log, ElementsAre("+m", "+t", "-t", "-m"));
}

TEST(Interceptor, PassesEveryKindOfValue) {
  struct Count : Interceptor {
    Values call(Module&, Values inputs, const Next& next) override {
      given = inputs.size();
      none = inputs[1].isNone();
      Values outputs = next(std::move(inputs));
      returned = outputs.size();
      return outputs;
    }
    size_t given = 0, returned = 0;
    bool none = false;
  };
  Many many;
  auto handle = c10::make_intrusive<Handle>();
  const at::Tensor x = at::arange(4, at::kFloat);
  const auto run = [&](auto&&... last) {
    return many(x, std::nullopt, std::vector<at::Tensor>{x, x}, 3, 2, true, "four", std::vector<int64_t>{2, 2}, handle, last...);
  };
  const auto [plain, plain_maybe, plain_size] = run();
  auto count = std::make_shared<Count>();
  const auto attached = attach(*many, count);
  const auto [passed, maybe, size] = run();
  EXPECT_TRUE(at::equal(plain, passed));
  EXPECT_FALSE(maybe.has_value());
  EXPECT_EQ(size, plain_size);
  EXPECT_EQ(size, 9);  // forward's own default for what the call leaves out
  EXPECT_EQ(count->given, 9u);
  EXPECT_EQ(count->returned, 3u);
  EXPECT_TRUE(count->none);
  EXPECT_EQ(handle->uses, 2);
  EXPECT_EQ(std::get<2>(run(std::nullopt)), 104);
  EXPECT_EQ(count->given, 10u);
  const auto [_, given, __] = many(x, x, std::vector<at::Tensor>{}, 1, 1, false, "", std::vector<int64_t>{4}, c10::intrusive_ptr<Handle>());
  EXPECT_TRUE(at::equal(*given, x));
}

TEST(Interceptor, WrongNumberOrKindOfValuesIsNamed) {
  struct Drop : Interceptor {
    Values call(Module&, Values inputs, const Next& next) override {
      if (kind) inputs[0] = int64_t{3};
      if (!kind) inputs.pop_back();
      return next(std::move(inputs));
    }
    bool kind = false;
  };
  Linear linear(2, 2);
  linear->set_path("a.b");
  auto drop = std::make_shared<Drop>();
  const auto attached = attach(*linear, drop);
  EXPECT_THROW(linear(at::ones({1, 2})), InternalError);
  drop->kind = true;
  EXPECT_THROW(linear(at::ones({1, 2})), InternalError);
}

TEST(Interceptor, ChangesInputsAndOutputsAndMayCallAgain) {
  struct Twice : Interceptor {
    Values call(Module&, Values inputs, const Next& next) override {
      kept = std::make_unique<Next>(next);
      return {next(inputs)[0].toTensor() + next({inputs[0].toTensor() * 2})[0].toTensor()};
    }
    std::unique_ptr<Next> kept;
  };
  Linear linear(LinearOptions(2, 3).bias(false));
  const at::Tensor x = at::randn({4, 2});
  const at::Tensor plain = linear(x);
  auto twice = std::make_shared<Twice>();
  auto attached = attach(*linear, twice);
  EXPECT_TRUE(at::allclose(linear(x), plain * 3, 1e-5, 1e-6));
  attached.detach();
  EXPECT_TRUE(at::equal((*twice->kept)({x})[0].toTensor(), plain));  // kept and called when the chain is gone, as recompute does
}

TEST(Interceptor, GradientsPassThrough) {
  Linear linear(2, 3);
  std::vector<std::string> log;
  const auto attached = attach(*linear, std::make_shared<Tracer>("a", log));
  linear(at::ones({4, 2})).sum().backward();
  EXPECT_TRUE(at::equal(linear->weight.grad(), at::full({3, 2}, 4.0)));
}

TEST(Interceptor, TheOutermostOpinionSaysWhereAnOutputLives) {
  struct Placed : Interceptor {
    explicit Placed(std::string axis) : axis(std::move(axis)) {}
    Values call(Module&, Values inputs, const Next& next) override { return next(std::move(inputs)); }
    std::optional<OutputLayout> output_layout(const Module&, const at::Tensor&) const override {
      if (axis.empty()) return std::nullopt;
      return OutputLayout{{}, {axis}};
    }
    std::string axis;
  };
  Linear linear(2, 2);
  const at::Tensor out = at::ones({1});
  EXPECT_FALSE(output_layout(*linear, out));
  const auto a = attach(*linear, std::make_shared<Placed>("tp"));
  const auto b = attach(*linear, std::make_shared<Placed>("cp"));
  const auto c = attach(*linear, std::make_shared<Placed>(""));
  EXPECT_THAT(output_layout(*linear, out)->partial_over, ElementsAre("cp"));
}

TEST(Calls, LayersOfOursGoThroughTheChainHoweverTheyAreCalled) {
  std::vector<std::string> log;
  Linear linear(2, 2);
  const auto attached = attach(*linear, std::make_shared<Tracer>("a", log));
  const at::Tensor x = at::ones({1, 2});
  linear->forward(x);
  torch::nn::AnyModule any(linear.ptr());
  any.forward(x);
  EXPECT_THAT(log, ElementsAre("+a", "-a", "+a", "-a"));

  Sequential sequence(Linear(2, 2));
  const auto around = attach(*sequence, std::make_shared<Tracer>("s", log));
  log.clear();
  sequence->forward(x);
  sequence(x);
  EXPECT_THAT(log, ElementsAre("+s", "-s", "+s", "-s"));
}

/// A user's module, which knows nothing of that.
struct UsersImpl : Module {
  UsersImpl() : inner(2, 2) { register_module("inner", inner); }
  at::Tensor forward(const at::Tensor& x) { return inner(x); }
  Linear inner;
};
TESSERA_MODULE(Users);

TEST(Calls, AModuleThatIsNeverCalledThroughItsHolderIsNamedAtItsFirstGradient) {
  Users users;
  users->set_path("layers.0");
  const at::Tensor x = at::ones({1, 2});
  {
    const auto expecting = expect_call(*users, "recompute");
    const std::string refused = refusal([&] { users->forward(x).sum().backward(); });
    EXPECT_THAT(refused, HasSubstr("recompute: 'layers.0'"));
    EXPECT_THAT(refused, HasSubstr("`layer(x)` for `layer->forward(x)`"));
  }
  users->forward(x).sum().backward();  // nobody expects it any more
  std::vector<std::string> log;
  const auto attached = attach(*users, std::make_shared<Tracer>("a", log));
  const auto expecting = expect_call(*users, "recompute");
  at::ones({2}).requires_grad_().sum().backward();  // another model's step
  users(x).sum().backward();
  users->forward(x).sum().backward();  // it has been called
}

TEST(Attach, AModelOnTheStackIsWalkedAsAnyOther) {
  struct Root : Module {
    Root() : first(2, 2) {
      register_module("first", first);
      register_module("norm", torch::nn::BatchNorm1d(2));
    }
    at::Tensor forward(const at::Tensor& x) { return first(x); }
    Linear first;
  };
  std::vector<std::string> log;
  Attachment late;
  {
    Root root;
    assign_paths(root);
    check_no_bypass(root);
    materialize(root, 1, testing_support::test_device());
    EXPECT_EQ(unique_parameters(root).size(), 4u);
    EXPECT_EQ(modules_matching(root, "")[0].second.get(), &root);
    EXPECT_EQ(modules_matching(root, "*").size(), 2u);
    const auto attached = attach(root, "", std::make_shared<Tracer>("r", log));
    late = attach(root, std::make_shared<Tracer>("late", log));
    const auto expecting = expect_call(root, "test");
    call(root, at::ones({1, 2})).sum().backward();
    EXPECT_THAT(log, ElementsAre("+late", "+r", "-r", "-late"));
  }
  late.detach();  // the model is gone

  auto lazy = on_meta([] { return std::make_unique<Root>(); });
  materialize(*lazy, 1, testing_support::test_device());
  EXPECT_FALSE(lazy->parameters()[0].is_meta());
}

TEST(Attach, PatternsMatchComponents) {
  EXPECT_TRUE(matches("layers.*.w1", "layers.0.w1"));
  EXPECT_TRUE(matches("layers.*.w1", "layers.12.w1"));
  EXPECT_FALSE(matches("layers.*.w1", "layers.0.feed_forward.w1"));
  EXPECT_FALSE(matches("layers.*.w1", "layers.0.w11"));
  EXPECT_FALSE(matches("layers.*", "layers"));
  EXPECT_TRUE(matches("layers.*.w*", "layers.0.w11"));
  EXPECT_TRUE(matches("**.w1", "layers.0.feed_forward.w1"));
  EXPECT_TRUE(matches("**.w1", "w1"));
  EXPECT_TRUE(matches("layers.**", "layers.0.w1"));
  EXPECT_TRUE(matches("layers.**.w1", "layers.0.a.b.w1"));
  EXPECT_TRUE(matches("**", "a.b"));
  EXPECT_TRUE(matches("a*c*e", "abcde"));
  EXPECT_FALSE(matches("a*c*e", "abcd"));
  EXPECT_TRUE(matches("", ""));
  EXPECT_FALSE(matches("", "a"));
}

TEST(Attach, ByPathInOrderOfRegistration) {
  Net net;
  assign_paths(*net);
  std::vector<std::string> paths;
  const auto attached = attach(*net, "layers.*.w1", [&](Module& module) {
    paths.push_back(module.path());
    return std::make_shared<Tracer>(module.path(), paths);
  });
  EXPECT_THAT(paths, ElementsAre("layers.0.w1", "layers.1.w1", "layers.2.w1"));
  EXPECT_EQ(net->path(), "");
}

TEST(Attach, PassesOverListsUnlessNothingElseMatches) {
  Net net;
  std::vector<std::string> log;
  const auto tracer = std::make_shared<Tracer>("a", log);
  const auto attached = attach(*net, "layers.**", tracer);
  EXPECT_EQ(net->layers[0]->as<BlockImpl>()->chain()->size(), 1u);
  EXPECT_THAT(refusal([&] { (void)attach(*net, "layers", tracer); }), HasSubstr("cannot be intercepted"));
}

TEST(Attach, RefusalNamesTheNearestPathOrThePlainModule) {
  Net net;
  std::vector<std::string> log;
  const auto tracer = std::make_shared<Tracer>("a", log);
  EXPECT_THAT(refusal([&] { (void)attach(*net, "layers.0.w3", tracer); }), HasSubstr("no module matches 'layers.0.w3'"));
  EXPECT_THAT(refusal([&] { (void)attach(*net, "layers.0.w3", tracer); }), HasSubstr("the nearest path is 'layers.0.w"));
  const std::string plain = refusal([&] { (void)attach(*net, "*", tracer); });
  EXPECT_THAT(plain, HasSubstr("TESSERA_MODULE"));
  EXPECT_THAT(refusal([&] { (void)attach(*net, "plain", tracer); }), HasSubstr("'plain' ("));
}

TEST(Attach, ModulesOfOursInsideTheirSequentialAreRefused) {
  torch::nn::Sequential fine(torch::nn::Linear(2, 2));
  check_no_bypass(*fine);
  struct HolderImpl : torch::nn::Module {
    HolderImpl() { register_module("inner", torch::nn::Sequential(torch::nn::Linear(2, 2), Linear(2, 2))); }
  };
  auto holder = std::make_shared<HolderImpl>();
  EXPECT_THAT(refusal([&] { check_no_bypass(*holder); }), HasSubstr("'inner.1'"));
  EXPECT_THAT(refusal([&] { check_no_bypass(*holder); }), HasSubstr("tessera::nn::Sequential"));
}

TEST(SequentialTest, CallsPassTheInterceptorsOfItsChildren) {
  Sequential model(Linear(2, 3), at::relu, torch::nn::Linear(3, 4), Linear(4, 1));
  EXPECT_EQ(model->size(), 4u);
  std::vector<std::string> log;
  const auto first = attach(*model, "0", std::make_shared<Tracer>("0", log));
  const auto last = attach(*model, "3", std::make_shared<Tracer>("3", log));
  EXPECT_EQ(model(at::ones({5, 2})).sizes(), (std::vector<int64_t>{5, 1}));
  EXPECT_THAT(log, ElementsAre("+0", "-0", "+3", "-3"));
  check_no_bypass(*model);
  Sequential empty;
  const at::Tensor x = at::ones({2});
  EXPECT_TRUE(at::equal(empty(x), x));
}

}  // namespace
}  // namespace tessera::nn
