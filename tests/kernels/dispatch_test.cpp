#include "tessera/kernels/dispatch.h"

#include "tessera/core/error.h"
#include "tessera/kernels/choice.h"
#include "tessera/kernels/reference.h"
#include "tests/kernels/support.h"
#include "tests/test_device.h"

namespace tessera::kernels {
namespace {

using namespace tessera::testing_support;
using ::testing::HasSubstr;

at::Tensor ids(std::initializer_list<int64_t> values) { return at::tensor(std::vector<int64_t>(values), at::kLong); }

TEST(ChooseExperts, TakesTheLargestAndOfEqualOnesTheLowerIndex) {
  const at::Tensor scores = at::tensor({0.1f, 0.5f, 0.5f, 0.2f, 3.f, 3.f, 3.f, 3.f, -1.f, -2.f, -1.f, -0.5f}).view({3, 4});
  EXPECT_TRUE(at::equal(choose_experts(scores, 2), ids({1, 2, 0, 1, 3, 0}).view({3, 2})));
  for (const int64_t k : {1, 3, 4}) EXPECT_TRUE(at::equal(choose_experts(scores, k), reference::choose_experts(scores, k))) << k;
}

TEST(ChooseExperts, EqualsTheStableSortWithManyTies) {
  for (const auto& [tokens, experts] : {std::pair{1, 1}, {7, 5}, {257, 8}, {33, 64}, {0, 4}}) {
    const at::Tensor scores = (random({tokens, experts}) * 2).round();
    for (const int64_t k : {int64_t{1}, std::min<int64_t>(experts, 3), static_cast<int64_t>(experts)}) {
      EXPECT_TRUE(at::equal(choose_experts(scores, k), reference::choose_experts(scores, k))) << tokens << " " << experts << " " << k;
    }
  }
}

TEST(ChooseExperts, SurvivesScoresThatAreNoNumbers) {
  const at::Tensor chosen = choose_experts(at::full({2, 3}, NAN), 3);
  EXPECT_TRUE(at::equal(std::get<0>(chosen.sort(1)), ids({0, 1, 2, 0, 1, 2}).view({2, 3})));
}

TEST(ChooseTokens, EachExpertTakesItsBestAndOfEqualOnesTheEarlier) {
  const at::Tensor scores = at::tensor({1.f, 0.f, 1.f, 2.f, 0.f, 2.f, 1.f, 5.f}).view({4, 2});
  EXPECT_TRUE(at::equal(choose_tokens(scores, 2), ids({0, -1, 0, 1, -1, -1, -1, 1}).view({4, 2})));
  EXPECT_EQ(choose_tokens(at::zeros({0, 3}), 1).size(0), 0);
}

TEST(Dispatch, SortsChoicesByExpertInTheOrderOfTokens) {
  const at::Tensor chosen = ids({2, 0, 2, 1, 0, 2}).view({3, 2});
  const Dispatch where = dispatch(chosen, 4);
  EXPECT_TRUE(at::equal(where.counts, ids({2, 1, 3, 0})));
  EXPECT_TRUE(at::equal(where.order, ids({1, 4, 3, 0, 2, 5})));
  EXPECT_TRUE(at::equal(where.slots, ids({3, 0, 4, 2, 1, 5}).view({3, 2})));
}

TEST(Dispatch, ACapacityDropsSecondChoicesBeforeFirstOnes) {
  const at::Tensor chosen = ids({1, 0, 0, 1, 0, 1}).view({3, 2});  // expert 0: first of tokens 1, 2, second of token 0
  const Dispatch where = dispatch(chosen, 2, {.capacity = 2});
  EXPECT_TRUE(at::equal(where.counts, ids({2, 2})));
  EXPECT_TRUE(at::equal(where.slots, ids({2, -1, 0, 3, 1, -1}).view({3, 2})));
  EXPECT_TRUE(at::equal(where.order, ids({2, 4, 0, 3})));
}

TEST(Dispatch, TheReferenceRunsWithoutMemory) {
  const at::Tensor scores = at::empty({3, 4}, at::TensorOptions(at::kMeta));
  const Dispatch where = reference::dispatch(reference::choose_experts(scores, 2), 4, /*capacity=*/2, /*places=*/6);
  EXPECT_EQ(where.order.sizes(), at::IntArrayRef({6}));
  const at::Tensor rows = reference::gather_rows(at::empty({3, 5}, at::TensorOptions(at::kMeta)), where);
  EXPECT_EQ(reference::combine_rows(rows, at::empty({3, 2}, at::TensorOptions(at::kMeta)), where).sizes(), at::IntArrayRef({3, 5}));
}

void expect_same_dispatch(const Dispatch& actual, const Dispatch& expected, const std::string& what) {
  EXPECT_TRUE(at::equal(actual.counts, expected.counts)) << what;
  EXPECT_TRUE(at::equal(actual.order, expected.order)) << what;
  EXPECT_TRUE(at::equal(actual.slots, expected.slots)) << what;
}

TEST(Dispatch, EqualsTheReferenceWithAndWithoutDrops) {
  for (const auto& [tokens, choices, experts] : {std::tuple{1, 1, 1}, {13, 2, 5}, {64, 3, 8}, {5, 2, 16}, {0, 2, 3}}) {
    const at::Tensor chosen = at::randint(-1, experts, {tokens, choices}, at::kLong);
    for (const auto& capacity : {std::optional<int64_t>(), std::optional<int64_t>(1), std::optional<int64_t>(4), std::optional<int64_t>(1000)}) {
      const Dispatch fused = dispatch(chosen, experts, {.capacity = capacity});
      const KernelChoiceGuard plain(KernelChoice::Reference);
      expect_same_dispatch(fused, dispatch(chosen, experts, {.capacity = capacity}), detail::concat(tokens, " tokens, capacity ", capacity.value_or(-1)));
    }
  }
}

TEST(Dispatch, AllTokensMayTakeOneExpert) {
  const Dispatch where = dispatch(at::full({9, 1}, 3, at::kLong), 5);
  EXPECT_TRUE(at::equal(where.counts, ids({0, 0, 0, 9, 0})));
  EXPECT_TRUE(at::equal(where.order, at::arange(9, at::kLong)));
}

TEST(Dispatch, RefusesExpertsThatAreNotThere) {
  if (asserts_on_device()) GTEST_SKIP() << "CUDA's kernels assert it";
  EXPECT_THAT(message_of<std::exception>([] { dispatch(ids({0, 4}).view({1, 2}), 4); }), HasSubstr(of_kernel("expert 4 of 4")));
}

TEST(Dispatch, RefusesLimitsThatLeaveNothing) {
  EXPECT_THAT(message_of<ConfigError>([] { dispatch(ids({0}).view({1, 1}), 4, {.capacity = 0}); }), HasSubstr("drop every token"));
  EXPECT_THAT(message_of<ConfigError>([] { choose_experts(at::zeros({2, 3}), 4); }), HasSubstr("k = 4 of 3 experts"));
}

class Rows : public ::testing::TestWithParam<std::tuple<at::ScalarType, int64_t>> {};

TEST_P(Rows, GoAndComeBackAsInTheReference) {
  const auto& [dtype, dim] = GetParam();
  for (const auto& capacity : {std::optional<int64_t>(), std::optional<int64_t>(3)}) {
    const Dispatch where = dispatch(choose_experts(random({11, 5}, at::kFloat, 3), 2), 5, {.capacity = capacity});
    const int64_t places = where.order.size(0);
    expect_same([&](const auto& in) { return gather_rows(in[0], where); }, [&](const auto& in) { return reference::gather_rows(in[0], where); },
                {random({11, dim}, dtype, 1)}, tolerance(dtype));
    const at::Tensor weights = random({11, 2}, at::kFloat, 2);
    expect_same([&](const auto& in) { return combine_rows(in[0], in[1].to(at::kFloat), where); },
                [&](const auto& in) { return reference::combine_rows(in[0], in[1], where); }, {random({places, dim}, dtype, 4), weights}, tolerance(dtype));
  }
}

INSTANTIATE_TEST_SUITE_P(Types, Rows, ::testing::Combine(::testing::Values(at::kFloat, at::kBFloat16), ::testing::Values<int64_t>(1, 7, 16, 33, 130)));

TEST(Rows, HaveTheSameBitsOnAnyNumberOfThreads) {
  const Dispatch where = dispatch(choose_experts(random({300, 8}), 2), 8);
  const at::Tensor x = random({300, 129}).requires_grad_(true), weights = random({300, 2}, at::kFloat, 5).requires_grad_(true);
  expect_thread_independent([&] {
    x.mutable_grad() = at::Tensor();
    weights.mutable_grad() = at::Tensor();
    const at::Tensor out = combine_rows(gather_rows(x, where), weights, where);
    out.backward(random(out.sizes(), at::kFloat, 7));
    return std::vector{out.detach(), x.grad(), weights.grad()};
  });
}

/// Rows, and the gradient of what they are combined to, with other strides each.
TEST(Rows, MayBeNarrowerThanTheirMemory) {
  const Dispatch where = dispatch(choose_experts(random({11, 5}, at::kFloat, 3), 2), 5);
  const auto results = [&](const at::Tensor& rows, const at::Tensor& grad) {
    const at::Tensor given = rows.detach().requires_grad_(true), weights = random({11, 2}, at::kFloat, 2).requires_grad_(true);
    const at::Tensor out = combine_rows(given, weights, where);
    out.backward(grad);
    return std::vector{out.detach(), given.grad(), weights.grad()};
  };
  const at::Tensor rows = random({22, 50}, at::kFloat, 4).narrow(1, 8, 33), grad = random({11, 70}, at::kFloat, 5).narrow(1, 16, 33);
  const auto narrow = results(rows, grad), whole = results(rows.contiguous(), grad.contiguous());
  for (size_t i = 0; i < whole.size(); ++i) EXPECT_TRUE(at::equal(narrow[i], whole[i])) << i;
}

TEST(Rows, OfTokensThatWereDroppedAreZero) {
  const Dispatch where = dispatch(at::zeros({4, 1}, at::kLong), 2, {.capacity = 1});
  const at::Tensor out = combine_rows(gather_rows(at::ones({4, 3}), where), at::ones({4, 1}), where);
  EXPECT_TRUE(at::equal(out.sum(1), at::tensor({3.f, 0.f, 0.f, 0.f})));
  EXPECT_TRUE(at::equal(gather_rows(at::ones({4, 3}), where).sum(1), at::tensor({3.f, 0.f})));
}

/// As on a rank to whose experts no token goes: libtorch's own gradient of no selected rows is an exception.
TEST(Rows, ThatAreNoneHaveAGradientByPlainOperators) {
  const auto none = [](std::vector<int64_t> sizes) { return at::zeros(sizes, at::kLong); };
  const Dispatch nothing{.slots = at::full({4, 1}, -1, at::kLong), .order = none({0}), .counts = none({2})},
      nobody{.slots = none({0, 1}), .order = none({0}), .counts = none({2})};
  for (const auto& [tokens, where] : {std::pair(4, nothing), std::pair(0, nobody)}) {
    const at::Tensor x = at::ones({tokens, 3}).requires_grad_(), weights = at::ones({tokens, 1}).requires_grad_();
    const at::Tensor out = reference::combine_rows(reference::gather_rows(x, where), weights, where);
    EXPECT_EQ(out.sizes(), x.sizes());
    (out.sum() + reference::gather_rows(x, where).sum()).backward();
    EXPECT_TRUE(at::equal(x.grad(), at::zeros({tokens, 3})));
  }
}

}  // namespace
}  // namespace tessera::kernels
