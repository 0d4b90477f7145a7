#include "tessera/nn/router.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tessera/core/error.h"
#include "tessera/nn/auxiliary_loss.h"
#include "tessera/nn/decisions.h"
#include "tessera/nn/experts.h"
#include "tessera/nn/sample_scope.h"
#include "tessera/nn/saved_tensors.h"
#include "tessera/nn/weight_gradients.h"

namespace tessera::nn {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

at::Tensor numbers(at::IntArrayRef shape, double step = 0.7) {
  int64_t count = 1;
  for (const int64_t size : shape) count *= size;
  return (at::arange(count, at::kFloat) * step).sin().view(shape);
}

Router router_of(RouterKind kind, bool normalize = true, int64_t experts = 5, int64_t per_token = 2) {
  Router router(RouterOptions{.dim = 6, .experts = experts, .per_token = per_token, .kind = kind, .normalize = normalize});
  const at::NoGradGuard no_grad;
  router->weight.copy_(numbers({experts, 6}, 1.3));
  return router;
}

TEST(SampleContext, OfMicroBatchesThatCountOtherwiseDiffers) {
  EXPECT_TRUE((SampleContext{.valid_tokens = 3} == SampleContext{.valid_tokens = 3}));
  EXPECT_FALSE((SampleContext{.valid_tokens = 3} == SampleContext{.valid_tokens = 4}));
  EXPECT_FALSE((SampleContext{} == SampleContext{.valid_tokens = 0}));
  EXPECT_FALSE((SampleContext{} == SampleContext{.padding = at::zeros({1, 3}, at::kBool)}));
}

TEST(Router, SoftmaxTakesTheMostProbableAndNormalizesTheirWeights) {
  Router router = router_of(RouterKind::Softmax);
  const at::Tensor x = numbers({7, 6});
  const auto [weights, chosen] = router(x);
  const at::Tensor probabilities = at::softmax(at::linear(x, router->weight), -1);
  const auto [values, indices] = probabilities.topk(2);
  EXPECT_TRUE(at::equal(chosen, indices));
  EXPECT_TRUE(at::allclose(weights, values / values.sum(-1, true), 1e-6));
  EXPECT_TRUE(at::allclose(std::get<0>(router_of(RouterKind::Softmax, false)(x)), values, 1e-6));
}

TEST(Router, TheBiasChangesTheChoiceAndNotTheWeights) {
  Router router = router_of(RouterKind::Sigmoid, /*normalize=*/false);
  const at::Tensor x = numbers({7, 6});
  const at::Tensor scores = at::sigmoid(at::linear(x, router->weight));
  router->bias.copy_(at::tensor({0.f, 0.f, 0.f, 10.f, 0.f}));
  const auto [weights, chosen] = router(x);
  EXPECT_TRUE(chosen.select(1, 0).eq(3).all().item<bool>());
  EXPECT_TRUE(at::allclose(weights, scores.gather(1, chosen), 1e-6));
}

TEST(Router, TheBiasMovesAgainstTheLoad) {
  Router router = router_of(RouterKind::Sigmoid);
  router->balance(at::tensor({10., 0., 4., 4., 2.}, at::kDouble), 0.5);
  EXPECT_TRUE(at::equal(router->bias, at::tensor({-0.5f, 0.5f, 0.f, 0.f, 0.5f})));
  Router(router_of(RouterKind::Softmax))->balance(at::ones({5}), 0.5);  // has none
}

TEST(Router, ExpertsChooseEvenly) {
  Router router = router_of(RouterKind::ExpertChoice);
  const auto [weights, chosen] = router(numbers({10, 6}));
  EXPECT_EQ(chosen.sizes(), at::IntArrayRef({10, 5}));
  EXPECT_TRUE(chosen.ge(0).sum(0).eq(4).all().item<bool>());  // 10 * 2 / 5
  EXPECT_EQ(router->options().places(10), 20);
}

/// Gradient of the router's weight from the terms alone, of micro-batches of these rows of x.
at::Tensor gradient_of_terms(const std::vector<std::pair<int64_t, int64_t>>& micro_batches, const std::function<double(int64_t)>& share) {
  Router router = router_of(RouterKind::Softmax);
  router->set_losses({.balance = 0.3, .z = 0.2});
  const at::Tensor x = numbers({12, 6});
  for (const auto& [first, rows] : micro_batches) {
    const SampleScope scope({.expected_gradient = share(rows) / static_cast<double>(rows), .valid_tokens = rows});
    (std::get<0>(router(x.narrow(0, first, rows))) * 0).sum().backward();
  }
  return router->weight.grad();
}

TEST(Router, TermsAreWeighedByTheShareOfTheStepThatAMicroBatchIs) {
  // By hand: the mean over micro-batches of equal size of each one's balance and z term.
  const at::Tensor weight = numbers({5, 6}, 1.3).requires_grad_(true), x = numbers({12, 6});
  at::Tensor loss = at::zeros({});
  for (const int64_t first : {0, 4, 8}) {
    const at::Tensor logits = at::linear(x.narrow(0, first, 4), weight), p = at::softmax(logits, -1);
    const at::Tensor f = at::one_hot(std::get<1>(p.topk(2)), 5).to(at::kFloat).sum({0, 1}) / 8;
    loss = loss + (0.3 * 5 * (f.detach() * p.mean(0)).sum() + 0.2 * at::logsumexp(logits, -1).square().mean()) / 3;
  }
  loss.backward();
  const at::Tensor ours = gradient_of_terms({{0, 4}, {4, 4}, {8, 4}}, [](int64_t rows) { return static_cast<double>(rows) / 12; });
  EXPECT_LE((ours - weight.grad()).abs().max().item<double>(), 1e-6 * weight.grad().abs().max().item<double>());
}

TEST(Router, CountsLoadOnceAndNotOfPaddingOrEvaluation) {
  Router router = router_of(RouterKind::Softmax);
  const at::Tensor x = numbers({7, 6});
  const auto [weights, chosen] = router(x);
  const at::Tensor once = router->statistics().clone();
  EXPECT_EQ(once.narrow(0, 0, 5).sum().item<double>(), 14);
  EXPECT_EQ(once[5].item<double>(), 7);
  EXPECT_EQ(once[0].item<double>(), chosen.eq(0).sum().item<int64_t>());
  {
    const RecomputingScope again;
    router(x);
  }
  {
    const SampleScope padding({.valid_tokens = 0});
    router(x);
  }
  router->eval();
  router(x);
  EXPECT_TRUE(at::equal(router->statistics(), once));
  router->clear_statistics();
  EXPECT_EQ(router->statistics().abs().sum().item<double>(), 0);
}

/// Two windows of six columns, of which four and three hold tokens, the others alike.
const std::vector<bool> kHolds{true, true, true, true, false, false, true, true, true, false, false, false};

at::Tensor rows_that(bool hold) {
  std::vector<int64_t> rows;
  for (size_t row = 0; row < kHolds.size(); ++row) {
    if (kHolds[row] == hold) rows.push_back(static_cast<int64_t>(row));
  }
  return at::tensor(rows, at::kLong);
}

SampleContext padded_context() {
  return {.expected_gradient = 0.5, .valid_tokens = 7, .padding = at::ones({1, 12}, at::kBool).index_fill_(1, rows_that(true), false), .padding_size = 5};
}

/// What a router makes of tokens: weights, choice, gradients of its weight and of the tokens, statistics.
std::vector<at::Tensor> routed(RouterKind kind, const at::Tensor& tokens, const SampleContext& context, const at::Tensor& those) {
  Router router = router_of(kind);
  router->set_losses({.balance = 0.3, .z = 0.2});
  const at::Tensor x = tokens.detach().requires_grad_(true);
  const SampleScope scope(context);
  const auto [weights, chosen] = router(x);
  const at::Tensor taken = weights.index_select(0, those) * chosen.index_select(0, those).ge(0);
  (taken * numbers(taken.sizes(), 2.1)).sum().backward();
  return {taken.detach(), chosen.index_select(0, those), router->weight.grad(), x.grad().index_select(0, those), router->statistics()};
}

TEST(Router, OfAPaddedWindowIsThatOfItsTokensAlone) {
  for (const RouterKind kind : {RouterKind::Softmax, RouterKind::Sigmoid, RouterKind::ExpertChoice}) {
    const at::Tensor tokens = numbers({7, 6}), x = at::full({12, 6}, 1.7).index_copy_(0, rows_that(true), tokens);
    const auto padded = routed(kind, x, padded_context(), rows_that(true));
    const auto alone = routed(kind, tokens, {.expected_gradient = 0.5, .valid_tokens = 7}, at::arange(7));
    for (size_t i = 0; i < alone.size(); ++i) {
      EXPECT_TRUE(at::allclose(padded[i], alone[i], 1e-5, 1e-6)) << static_cast<int>(kind) << ", " << i << ": " << padded[i] << alone[i];
    }
    Router router = router_of(kind);
    const SampleScope scope(padded_context());
    const at::Tensor of_padding = std::get<1>(router(x)).index_select(0, rows_that(false));
    EXPECT_TRUE(of_padding.eq(-1).all().item<bool>()) << "takes no place";
  }
}

TEST(Router, CountsTheTokensOfAPartOfTheColumns) {
  Router router = router_of(RouterKind::Softmax);
  SampleContext context = padded_context();
  context.first_column = 3;  // tokens in columns 3, 6 and 7
  context.columns = 5;
  const SampleScope scope(context);
  router(numbers({5, 6}));
  EXPECT_EQ(router->statistics().narrow(0, 0, 5).sum().item<double>(), 6);
  EXPECT_EQ(router->statistics()[5].item<double>(), 3);
}

TEST(Router, RefusesThePaddingOfOtherTokens) {
  Router router = router_of(RouterKind::Softmax);
  const at::Tensor x = numbers({4, 6});
  const auto given = [&](const SampleContext& context) {
    return [&, context] {
      const SampleScope scope(context);
      router(x);
    };
  };
  // Two rows of the eight, in a scope that was opened around the whole batch.
  EXPECT_THAT(given({.padding = at::zeros({8, 2}, at::kBool), .padding_size = 0}),
              ThrowsMessage<ConfigError>(AllOf(HasSubstr("[8, 2]"), HasSubstr("16 tokens, and here are 4"), HasSubstr("open a SampleScope around each"))));
  EXPECT_THAT(given({.columns = 1, .padding = at::zeros({2, 2}, at::kBool)}), ThrowsMessage<ConfigError>(HasSubstr("2 tokens, and here are 4")));
  EXPECT_THAT(given({.padding = at::zeros({4}, at::kBool)}), ThrowsMessage<ConfigError>(HasSubstr("expected bool [rows, columns]")));
}

TEST(Router, CountsPaddingWhoseSizeNobodySaid) {
  SampleContext unsaid = padded_context();
  unsaid.padding_size = std::nullopt;
  for (const RouterKind kind : {RouterKind::Softmax, RouterKind::Sigmoid}) {
    const at::Tensor x = numbers({12, 6});
    const auto said = routed(kind, x, padded_context(), rows_that(true)), counted = routed(kind, x, unsaid, rows_that(true));
    for (size_t i = 0; i < said.size(); ++i) EXPECT_TRUE(at::equal(counted[i], said[i])) << static_cast<int>(kind) << ", " << i;
  }
  Router router = router_of(RouterKind::ExpertChoice);
  const SampleScope scope(unsaid);
  EXPECT_THAT([&] { router(numbers({12, 6})); }, ThrowsMessage<ConfigError>(AllOf(HasSubstr("SampleContext::padding_size"), HasSubstr("expert_choice"))));
}

TEST(Router, OfPaddingAloneHasNoTerms) {
  for (const RouterKind kind : {RouterKind::Softmax, RouterKind::Sigmoid, RouterKind::ExpertChoice}) {
    Router router = router_of(kind);
    router->set_losses({.balance = 0.3, .z = 0.2});
    const SampleScope scope({.padding = at::ones({1, 12}, at::kBool), .padding_size = 12});
    const auto [weights, chosen] = router(numbers({12, 6}));
    weights.sum().backward();
    EXPECT_TRUE(router->weight.grad().isfinite().all().item<bool>());
    EXPECT_TRUE(chosen.eq(-1).all().item<bool>());
    EXPECT_EQ(router->statistics().abs().sum().item<double>(), 0);
  }
}

TEST(Decisions, AreGivenAgainWhenAPassIsRepeated) {
  Router router = router_of(RouterKind::Softmax);
  const at::Tensor x = numbers({7, 6});
  Decisions::Record record;
  const at::Tensor first = std::get<1>(router(x));
  record.end();
  const at::Tensor other = x.flip(0);  // as if rounding had changed everything
  {
    const Decisions::Replay again(record);
    Decisions::Record nested;
    EXPECT_TRUE(at::equal(std::get<1>(router(other)), first));
    nested.end();
    const Decisions::Replay once_more(nested);
    EXPECT_TRUE(at::equal(std::get<1>(router(other)), first));
  }
  EXPECT_FALSE(at::equal(std::get<1>(router(other)), first));
}

TEST(Router, RefusesWhatCannotBe) {
  const auto message = [](auto&& f) -> std::string {
    try {
      f();
    } catch (const ConfigError& error) {
      return error.what();
    }
    return "";
  };
  EXPECT_THAT(message([] { Router(RouterOptions{.dim = 6, .experts = 2, .per_token = 3}); }), HasSubstr("per_token = 3: expected 1 to experts = 2"));
  EXPECT_THAT(message([] { router_of(RouterKind::Softmax)(numbers({2, 3, 6})); }), HasSubstr("expects tokens [T, 6]"));
}

TEST(GroupedExperts, EachTokenMeetsItsExpertAlone) {
  GroupedExperts experts(3, 4, 5, 0.5, 0.5);
  const at::Tensor x = numbers({7, 4}), counts = at::tensor(std::vector<int64_t>{2, 0, 4}, at::kLong);
  const at::Tensor out = experts(x, counts);
  const auto of = [&](const at::Tensor& weight, int64_t e) { return weight.detach().view({3, -1, weight.size(1)})[e]; };
  for (int64_t row = 0; row < 7; ++row) {
    const int64_t e = row < 2 ? 0 : 2;
    const at::Tensor token = x[row];
    const at::Tensor hidden = at::silu(at::mv(of(experts->w1, e), token)) * at::mv(of(experts->w3, e), token);
    const at::Tensor expected = row < 6 ? at::mv(of(experts->w2, e), hidden) : at::zeros({4});
    EXPECT_TRUE(at::allclose(out[row].detach(), expected, 1e-5, 1e-6)) << row;
  }
  out.sum().backward();
  EXPECT_EQ(experts->w1.grad().view({3, -1})[1].abs().sum().item<float>(), 0);
}

TEST(GroupedExperts, MayLeaveTheirWeightsGradientsForLater) {
  GroupedExperts experts(3, 4, 5, 0.5, 0.5);
  const at::Tensor x = numbers({7, 4}).requires_grad_(true), counts = at::tensor(std::vector<int64_t>{2, 0, 4}, at::kLong);
  const auto gradients = [&] { return std::vector{x.grad().clone(), experts->w1.grad().clone(), experts->w2.grad().clone(), experts->w3.grad().clone()}; };
  experts(x, counts).sum().backward();
  const auto at_once = gradients();
  experts->zero_grad();
  x.mutable_grad() = at::Tensor();
  const auto later = std::make_shared<WeightGradients>();
  {
    const LeaveWeightGradients scope(later);
    experts(x, counts).sum().backward();
  }
  EXPECT_FALSE(experts->w1.grad().defined() && experts->w1.grad().abs().sum().item<float>() > 0);
  EXPECT_FALSE(later->empty());
  later->compute();
  const auto left = gradients();
  for (size_t i = 0; i < left.size(); ++i) EXPECT_TRUE(at::equal(left[i], at_once[i])) << i;
}

}  // namespace
}  // namespace tessera::nn
