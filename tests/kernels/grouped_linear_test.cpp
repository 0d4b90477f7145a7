#include "tessera/kernels/grouped_linear.h"

#include "tessera/core/error.h"
#include "tessera/kernels/products.h"
#include "tessera/memory/memory.h"
#include "tests/kernels/support.h"

namespace tessera::kernels {
namespace {

using namespace tessera::testing_support;
using ::testing::HasSubstr;

/// Each group by itself; rows behind them are zero.
at::Tensor one_by_one(const at::Tensor& x, const at::Tensor& weight, const std::vector<int64_t>& sizes) {
  std::vector<at::Tensor> parts;
  int64_t first = 0;
  for (size_t group = 0; group < sizes.size(); ++group) {
    parts.push_back(at::mm(x.narrow(0, first, sizes[group]), weight.select(0, static_cast<int64_t>(group)).t()));
    first += sizes[group];
  }
  parts.push_back(at::zeros({x.size(0) - first, weight.size(1)}, x.options()));
  return at::cat(parts);
}

class GroupedLinear : public ::testing::TestWithParam<std::tuple<at::ScalarType, bool, std::vector<int64_t>>> {};

TEST_P(GroupedLinear, EqualsEachGroupByItself) {
  const auto& [dtype, native, sizes] = GetParam();
  const Bf16ProductsGuard products(native);
  const auto experts = static_cast<int64_t>(sizes.size());
  expect_same([&](const auto& in) { return grouped_linear(in[0], in[1], sizes); }, [&](const auto& in) { return one_by_one(in[0], in[1], sizes); },
              {random({12, 7}, dtype, 1), random({experts, 5, 7}, dtype, 2)}, dtype == at::kFloat ? 2e-6 : 1e-2);
}

INSTANTIATE_TEST_SUITE_P(Sizes, GroupedLinear,
                         ::testing::Combine(::testing::Values(at::kFloat, at::kBFloat16), ::testing::Bool(),
                                            ::testing::Values(std::vector<int64_t>{12}, std::vector<int64_t>{3, 0, 4, 5}, std::vector<int64_t>{0, 0, 12},
                                                              std::vector<int64_t>{0, 0}, std::vector<int64_t>{1, 2, 3})));

TEST(GroupedLinear, AGroupWithoutRowsHasAGradientOfZero) {
  const at::Tensor x = random({4, 3}), weight = random({3, 2, 3}).requires_grad_(true);
  grouped_linear(x, weight, {0, 4, 0}).sum().backward();
  EXPECT_TRUE(at::equal(weight.grad().select(0, 0), at::zeros({2, 3})));
  EXPECT_TRUE(at::equal(weight.grad().select(0, 2), at::zeros({2, 3})));
  EXPECT_GT(weight.grad().select(0, 1).abs().sum().item<float>(), 0);
}

TEST(GroupedLinear, WidenedProductsAreRoundedOnce) {
  const Bf16ProductsGuard widened(false);
  const at::Tensor x = random({9, 33}, at::kBFloat16, 1), weight = random({2, 6, 33}, at::kBFloat16, 2);
  const at::Tensor exact = one_by_one(x.to(at::kFloat), weight.to(at::kFloat), {4, 5});
  EXPECT_TRUE(at::equal(grouped_linear(x, weight, {4, 5}), exact.to(at::kBFloat16)));
}

/// Products that are made group by group copy what begins in the midst of a cache line: a plan counts as much as that can be.
TEST(GroupedLinear, TakesNoMoreMemoryThanADryRunSees) {
  const auto peak = [](at::Device device, const std::vector<int64_t>& sizes) {
    MemoryTracker tracker;
    const TrackMemory track(tracker);
    const at::Tensor x = random({41, 13}, at::kDouble, 1).to(device).requires_grad_(true);
    const at::Tensor weight = random({3, 9, 13}, at::kDouble, 2).to(device).requires_grad_(true);
    grouped_linear(x, weight, sizes).backward(at::zeros({41, 9}, x.options().requires_grad(false)));
    return tracker.peak();
  };
  const int64_t planned = peak(at::kMeta, {14, 14, 13});
  for (const std::vector<int64_t>& sizes : {std::vector<int64_t>{14, 14, 13}, {41, 0, 0}, {1, 2, 38}}) EXPECT_LE(peak(at::kCPU, sizes), planned);
}

/// Each group as a linear layer of its own: the same bits, its scales included.
TEST(GroupedLinear, InFp8IsFp8LinearOfEachGroup) {
  for (const Fp8Scaling scaling : {Fp8Scaling::Tensor, Fp8Scaling::Row}) {
    const std::vector<int64_t> sizes{3, 0, 4};
    const at::Tensor x = random({9, 16}, at::kBFloat16, 1).requires_grad_(true), weight = random({3, 8, 16}, at::kFloat, 2).requires_grad_(true);
    const at::Tensor y = grouped_linear(x, weight, sizes, Fp8Products{.out_dtype = at::kBFloat16, .scaling = scaling}), dy = random({9, 8}, at::kBFloat16, 3);
    y.backward(dy);
    EXPECT_EQ(y.scalar_type(), at::kBFloat16);
    EXPECT_EQ(y.narrow(0, 7, 2).abs().max().item<float>(), 0);
    EXPECT_EQ(x.grad().narrow(0, 7, 2).abs().max().item<float>(), 0);
    int64_t first = 0;
    for (size_t group = 0; group < sizes.size(); first += sizes[group++]) {
      const at::Tensor rows = x.detach().narrow(0, first, sizes[group]).clone().requires_grad_(true);
      const at::Tensor one = weight.detach().select(0, static_cast<int64_t>(group)).clone().requires_grad_(true);
      const at::Tensor alone = fp8_linear(rows, one, std::nullopt, at::kBFloat16, scaling);
      alone.backward(dy.narrow(0, first, sizes[group]));
      EXPECT_TRUE(at::equal(y.narrow(0, first, sizes[group]), alone));
      EXPECT_TRUE(at::equal(x.grad().narrow(0, first, sizes[group]), rows.grad()));
      EXPECT_TRUE(at::equal(weight.grad().select(0, static_cast<int64_t>(group)), one.grad()));
    }
  }
}

TEST(GroupSizes, AreEvenInADryRunAndReadElsewhere) {
  EXPECT_EQ(group_sizes(at::tensor(std::vector<int64_t>{3, 0, 5}, at::kLong), 8), (std::vector<int64_t>{3, 0, 5}));
  EXPECT_EQ(group_sizes(at::empty({3}, at::TensorOptions(at::kLong).device(at::kMeta)), 8), (std::vector<int64_t>{3, 3, 2}));
}

TEST(GroupedLinear, RefusesWhatDoesNotFit) {
  const at::Tensor x = random({4, 3}), weight = random({2, 5, 3});
  EXPECT_THAT(message_of<ConfigError>([&] { grouped_linear(x, weight, {2, 3}); }), HasSubstr("5 rows"));
  EXPECT_THAT(message_of<ConfigError>([&] { grouped_linear(x, weight, {4}); }), HasSubstr("1 groups"));
  EXPECT_THAT(message_of<ConfigError>([&] { grouped_linear(x, weight.to(at::kBFloat16), {2, 2}); }), HasSubstr("one dtype"));
}

}  // namespace
}  // namespace tessera::kernels
