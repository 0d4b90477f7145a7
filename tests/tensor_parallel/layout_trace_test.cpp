#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "support.h"
#include "tessera/core/error.h"

namespace tessera {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using namespace testing_support;

std::string refusal_of_plan(const ParallelPlan& plan, bool labels = true) {
  TokenNet net = on_meta([] { return TokenNet(); });
  const auto tokens = at::empty({2, 8}, at::TensorOptions().dtype(at::kLong).device(at::kMeta));
  try {
    check_parallel_plan(*net, 2, plan, [&] { net(tokens, labels ? std::optional(tokens) : std::nullopt); });
  } catch (const ConfigError& error) {
    return error.what();
  }
  return "";
}

ParallelPlan without(ParallelPlan plan, const std::string& pattern) {
  std::erase_if(plan, [&](const auto& entry) { return entry.first == pattern; });
  return plan;
}

ParallelPlan with(ParallelPlan plan, const std::string& pattern, ParallelStyle style) {
  plan = without(std::move(plan), pattern);
  plan.emplace_back(pattern, style);
  return plan;
}

TEST(LayoutTrace, PlansThatMeetPass) {
  for (const bool sequence : {false, true}) {
    for (const bool labels : {false, true}) EXPECT_EQ(refusal_of_plan(token_net_plan(sequence), labels), "");
  }
  // A layer that is gathered alone, between replicated ones.
  EXPECT_EQ(refusal_of_plan({{"gated0.w1", ColumnParallel{.output = TensorLayout::Replicated}}}), "");
}

TEST(LayoutTrace, LayoutsThatDoNotMeetAreRefused) {
  EXPECT_THAT(refusal_of_plan(with(token_net_plan(false), "gated*.w2", RowParallel{.input = TensorLayout::Replicated})),
              HasSubstr("'gated0.w2' takes what is replicated, and gets what is sharded on features from 'gated0.w1'"));
  EXPECT_THAT(refusal_of_plan(without(token_net_plan(false), "gated*")), HasSubstr("'gated0.w1' takes what is copied, and gets what is replicated"));
  EXPECT_THAT(refusal_of_plan(with(token_net_plan(true), "head", VocabParallelHead{})),
              HasSubstr("'head' takes what is replicated, and gets what is sharded on sequence"));
}

TEST(LayoutTrace, WhatMeaningForbidsIsRefused) {
  // Half of a gated layer is cut and the other is not.
  EXPECT_THAT(refusal_of_plan(without(token_net_plan(false), "gated*.w3")), HasSubstr("give the layer a style"));
  // A part of the features goes into the residual stream, and into a product.
  EXPECT_THAT(refusal_of_plan({{"gated1.w2", ColumnParallel{}}}), HasSubstr("aten::add of what 'drop1' gives, which is sharded on features"));
  EXPECT_THAT(refusal_of_plan({{"gated1.w1", ColumnParallel{}}, {"gated1.w3", ColumnParallel{}}}), HasSubstr("it needs all features"));
  // A norm on a part of the sequence, whose gradient nobody sums.
  EXPECT_THAT(refusal_of_plan(without(token_net_plan(true), "norm*")), HasSubstr("give the module the style SequenceParallel"));
}

/// Something of its own between two layers: on one device nothing of it is special.
struct OddImpl : nn::Module {
  explicit OddImpl(std::string what) : what(std::move(what)), gate(8, 8), w1(8, 8), w2(8, 8), norm(nn::LayerNormOptions({2})) {
    register_module("gate", gate);
    register_module("w1", w1);
    register_module("w2", w2);
    register_module("norm", norm);
    scale = register_parameter("scale", at::ones({1}));
  }
  at::Tensor forward(const at::Tensor& x) {
    at::Tensor h = w1(x);
    if (what == "slope") h = h * scale;
    if (what == "exp") h = h * scale.exp();
    if (what == "heads") h = norm(h.unflatten(-1, {-1, 2})).flatten(-2);
    if (what == "gate") h = h * gate(x).mean(-1, true);
    if (what == "constant") h = h * at::ones({1, 1, 1}, h.options());
    at::Tensor y = w2(h);
    if (what == "exp after") y = y * scale.exp();
    if (what == "gate after") y = y * gate(x.select(1, 0)).unsqueeze(1);
    if (what == "shift") y = y + scale.exp() * at::ones({1, 1, 1}, y.options());
    return y;
  }
  std::string what;
  nn::Linear gate, w1, w2;
  nn::LayerNorm norm;
  at::Tensor scale;
};
TESSERA_MODULE(Odd);

TEST(LayoutTrace, ParametersThatMeetAPartWouldGetAPartsGradient) {
  const auto said = [](const std::string& what, bool sequence) {
    struct HolderImpl : nn::Module {
      explicit HolderImpl(const std::string& what) : odd(what) { register_module("odd", odd); }
      Odd odd;
    };
    const auto holder = on_meta([&] { return std::make_shared<HolderImpl>(what); });
    const ParallelPlan plan{{"odd.w1", ColumnParallel{}}, {"odd.w2", RowParallel{.output = sequence ? TensorLayout::Sequence : TensorLayout::Replicated}}};
    try {
      check_parallel_plan(*holder, 2, plan, [&] { holder->odd(at::empty({2, 6, 8}, at::TensorOptions().device(at::kMeta))); });
    } catch (const ConfigError& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  for (const char* what : {"slope", "exp", "heads"}) EXPECT_THAT(said(what, false), HasSubstr("that of a part of the features")) << what;
  EXPECT_THAT(said("gate", false), HasSubstr("its gradient would be one rank's term"));
  for (const char* what : {"constant", "exp after", "gate after", "shift"}) EXPECT_EQ(said(what, false), "") << what;
  EXPECT_THAT(said("exp after", true), HasSubstr("that of a part of the sequence"));
  for (const char* what : {"gate after", "shift"}) EXPECT_THAT(said(what, true), HasSubstr("its gradient would be one rank's term")) << what;
  EXPECT_EQ(said("constant", true), "");
}

/// Any function between a column-wise layer and a row-wise one, and behind them.
struct BetweenImpl : nn::Module {
  using Function = std::function<at::Tensor(const at::Tensor&)>;
  BetweenImpl(Function inside, Function behind)
      : inside(std::move(inside)), behind(std::move(behind)), w1(nn::LinearOptions(8, 12).bias(false)), w2(nn::LinearOptions(12, 8).bias(false)) {
    register_module("w1", w1);
    register_module("w2", w2);
  }
  at::Tensor forward(const at::Tensor& x) { return behind(w2(inside(w1(x)))); }
  Function inside, behind;
  nn::Linear w1, w2;
};
TESSERA_MODULE(Between);

TEST(LayoutTrace, TakesInputsFromWhereARunHasThem) {
  const auto join = [](const at::Tensor& y) { return at::cat({y + at::ones({2, 6, 8}), at::zeros({2, 1, 8})}, 1); };
  auto net = on_meta([&] { return Between([](const at::Tensor& u) { return u * u; }, join); });
  const ParallelPlan plan{{"w1", ColumnParallel{}}, {"w2", RowParallel{}}};
  check_parallel_plan(*net, 2, plan, [&] { EXPECT_EQ(net(at::randn({2, 6, 8})).sizes(), at::IntArrayRef({2, 7, 8})); });
}

/// What the host's tensor becomes would be followed nowhere.
TEST(LayoutTrace, WhatIsWrittenIsNoInput) {
  auto net = on_meta([&] {
    return Between(
        [](const at::Tensor& u) {
          const at::Tensor host = at::zeros({6, 12});
          host.add_(u.select(0, 0).detach());
          return u * host;
        },
        [](const at::Tensor& y) { return y; });
  });
  const ParallelPlan plan{{"w1", ColumnParallel{}}, {"w2", RowParallel{}}};
  EXPECT_ANY_THROW(check_parallel_plan(*net, 2, plan, [&] { net(at::randn({2, 6, 8})); }));
}

TEST(LayoutTrace, WhatGoesAlongTheCutIsRefused) {
  using Function = BetweenImpl::Function;
  const Function same = [](const at::Tensor& y) { return y; };
  const auto said = [&](const Function& inside, const Function& behind) -> std::string {
    struct HolderImpl : nn::Module {
      HolderImpl(const Function& inside, const Function& behind) : net(inside, behind) { register_module("net", net); }
      Between net;
    };
    const auto holder = on_meta([&] { return std::make_shared<HolderImpl>(inside, behind); });
    const ParallelPlan plan{{"net.w1", ColumnParallel{}}, {"net.w2", RowParallel{.output = TensorLayout::Sequence}}};
    try {
      check_parallel_plan(*holder, 2, plan, [&] { holder->net(at::empty({2, 6, 8}, at::TensorOptions().device(at::kMeta))); });
    } catch (const ConfigError& error) {
      return error.what();
    }
    return "";
  };
  const std::vector<Function> of_features{
      [](const at::Tensor& u) { return u / u.norm(); },
      [](const at::Tensor& u) { return u - std::get<0>(u.max(-1, true)); },
      [](const at::Tensor& u) { return u * u.prod(-1, true); },
      [](const at::Tensor& u) { return u - u.amin({-1}, true); },
      [](const at::Tensor& u) { return u - std::get<0>(u.topk(1, -1)); },
      [](const at::Tensor& u) { return std::get<0>(u.sort(-1)); },
      [](const at::Tensor& u) { return u.flip({-1}); },
      [](const at::Tensor& u) { return u * u.narrow(-1, 0, 1); },
      [](const at::Tensor& u) { return u.index_select(-1, at::arange(u.size(-1), u.options().dtype(at::kLong))); },
      [](const at::Tensor& u) { return u * u.select(-1, 0).unsqueeze(-1); },
  };
  for (size_t i = 0; i < of_features.size(); ++i) EXPECT_THAT(said(of_features[i], same), HasSubstr("it needs all features")) << i;
  const std::vector<Function> of_positions{
      [](const at::Tensor& y) { return y - y.mean(1, true); },   [](const at::Tensor& y) { return y.sum(1); },
      [](const at::Tensor& y) { return y.amax({1}, true) + y; }, [](const at::Tensor& y) { return y.softmax(1); },
      [](const at::Tensor& y) { return y.select(1, 0); },        [](const at::Tensor& y) { return at::constant_pad_nd(y, {0, 0, 1, -1}); },
      [](const at::Tensor& y) { return y.square().mean(); },     [](const at::Tensor& y) { return y.flip({1}); },
  };
  for (size_t i = 0; i < of_positions.size(); ++i) EXPECT_THAT(said(same, of_positions[i]), HasSubstr("it needs the whole sequence")) << i;
  EXPECT_EQ(
      said([](const at::Tensor& u) { return at::gelu(u.slice(-1, 0)) * u.sigmoid(); }, [](const at::Tensor& y) { return y.softmax(-1) + y.mean(0, true); }),
      "");
}

/// relu between a row-wise product and its sum.
struct BentImpl : nn::Module {
  explicit BentImpl(bool bent) : bent(bent), w1(nn::LinearOptions(4, 6).bias(false)), w2(nn::LinearOptions(6, 4).bias(false)) {
    register_module("w1", w1);
    register_module("w2", w2);
  }
  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor y = w2(w1(x));
    return bent ? y.relu() : y * 2 + y;
  }
  bool bent;
  nn::Linear w1, w2;
};
TESSERA_MODULE(Bent);
struct OuterImpl : nn::Module {
  explicit OuterImpl(bool bent) : inner(bent) { register_module("inner", inner); }
  at::Tensor forward(const at::Tensor& x) { return x + inner(x); }
  Bent inner;
};
TESSERA_MODULE(Outer);

TEST(LayoutTrace, AFunctionOfTheTermsIsNoTermOfTheFunction) {
  const ParallelPlan plan{{"inner.w1", ColumnParallel{}},
                          {"inner.w2", RowParallel{.output = TensorLayout::Partial}},
                          {"inner", PrepareOutput{.from = TensorLayout::Partial, .to = TensorLayout::Replicated}}};
  const auto check = [&](bool bent, const ParallelPlan& plan) -> std::string {
    Outer net = on_meta([&] { return Outer(bent); });
    try {
      check_parallel_plan(*net, 3, plan, [&] { net(at::empty({2, 4}, at::kMeta)); });
    } catch (const ConfigError& error) {
      return error.what();
    }
    return "";
  };
  EXPECT_EQ(check(false, plan), "");
  EXPECT_THAT(check(true, plan), AllOf(HasSubstr("aten::relu"), HasSubstr("'inner.w2' gives, which is a partial sum"), HasSubstr("is not max(0, a + b)")));
  // Without the sum, the residual would be added on each rank.
  EXPECT_THAT(check(false, without(plan, "inner")), HasSubstr("would be added once for each"));
}

/// w2(w1(x) * w3(x)); or, `squared`, the square of what w2 gives; or, `shifted`, that plus one.
struct PairImpl : nn::Module {
  explicit PairImpl(bool squared = false, bool shifted = false)
      : squared(squared),
        shifted(shifted),
        w1(nn::LinearOptions(12, 12).bias(false)),
        w2(nn::LinearOptions(12, 12).bias(false)),
        w3(nn::LinearOptions(12, 12).bias(false)) {
    register_module("w1", w1);
    register_module("w2", w2);
    register_module("w3", w3);
  }
  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor y = w2(w1(x) * w3(x));
    return squared ? y * y : shifted ? y + 1 : y;
  }
  bool squared, shifted;
  nn::Linear w1, w2, w3;
};
TESSERA_MODULE(Pair);
struct PairHolderImpl : nn::Module {
  explicit PairHolderImpl(Pair made) : pair(std::move(made)) { register_module("pair", pair); }
  at::Tensor forward(const at::Tensor& x) { return pair(x); }
  Pair pair;
};
TESSERA_MODULE(PairHolder);

std::string refusal_of_pair(const ParallelPlan& plan, bool squared = false, bool shifted = false) {
  PairHolder net = on_meta([&] { return PairHolder(Pair(squared, shifted)); });
  try {
    check_parallel_plan(*net, 2, plan, [&] { net(at::empty({2, 5, 12}, at::kMeta)); });
  } catch (const ConfigError& error) {
    return error.what();
  }
  return "";
}

TEST(LayoutTrace, LayersThatAreCutInDifferentWaysAreRefused) {
  const FeatureCut heads = FeatureCut::query_heads(3, 3), features;  // 8 and 4, or 6 and 6
  const auto plan = [&](FeatureCut w1, FeatureCut w3, FeatureCut w2) {
    return ParallelPlan{{"pair.w1", ColumnParallel{.cut = w1}}, {"pair.w3", ColumnParallel{.cut = w3}}, {"pair.w2", RowParallel{.cut = w2}}};
  };
  EXPECT_EQ(refusal_of_pair(plan(heads, heads, heads)), "");
  EXPECT_THAT(refusal_of_pair(plan(heads, heads, features)), HasSubstr("'pair.w2' takes 6 of its features on the first rank, and gets 8 from 'pair.w1'"));
  EXPECT_THAT(refusal_of_pair(plan(heads, features, heads)), HasSubstr("with what 'pair.w3' gives: the two are cut in different ways"));
}

TEST(LayoutTrace, TermsAreNeitherMultipliedNorShifted) {
  const ParallelPlan plan{{"pair.w1", ColumnParallel{}},
                          {"pair.w3", ColumnParallel{}},
                          {"pair.w2", RowParallel{.output = TensorLayout::Partial}},
                          {"pair", PrepareOutput{.from = TensorLayout::Partial, .to = TensorLayout::Replicated}}};
  EXPECT_EQ(refusal_of_pair(plan), "");
  EXPECT_THAT(refusal_of_pair(plan, /*squared=*/true), HasSubstr("is not max(0, a + b)"));
  EXPECT_THAT(refusal_of_pair(plan, /*squared=*/false, /*shifted=*/true), HasSubstr("would be added once for each"));
}

TEST(LayoutTrace, AStatementIsHeldAgainstWhatThePassGives) {
  for (const bool sequence : {false, true}) {
    const TensorLayout stream = sequence ? TensorLayout::Sequence : TensorLayout::Replicated,
                       other = sequence ? TensorLayout::Replicated : TensorLayout::Sequence;
    EXPECT_EQ(refusal_of_plan(with(token_net_plan(sequence), "gated*", PrepareInput{.from = stream, .to = TensorLayout::Copied})), "");
    ParallelPlan plan = token_net_plan(sequence);
    plan.emplace_back("gated*", Gives{.layout = stream});
    EXPECT_EQ(refusal_of_plan(plan), "");
    plan.back().second = Gives{.layout = other};
    EXPECT_THAT(refusal_of_plan(plan), AllOf(HasSubstr("the plan says that 'gated0' gives what is "), HasSubstr("correct its Gives")));
  }
}

}  // namespace
}  // namespace tessera
