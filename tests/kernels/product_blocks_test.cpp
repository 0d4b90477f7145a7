#include "tessera/kernels/product_blocks.h"

#include <limits>
#include <numeric>

#include "tessera/kernels/cpu/loops.h"
#include "tessera/kernels/grouped_linear.h"
#include "tessera/memory/memory.h"
#include "tests/kernels/support.h"

namespace tessera::kernels {
namespace {

using namespace tessera::testing_support;

/// Each group by itself, by libtorch; rows behind them are zero.
at::Tensor each_group(const at::Tensor& x, const at::Tensor& weight, const std::vector<int64_t>& sizes) {
  std::vector<at::Tensor> parts;
  int64_t first = 0;
  for (size_t group = 0; group < sizes.size(); first += sizes[group++]) {
    parts.push_back(at::mm(x.narrow(0, first, sizes[group]), weight.select(0, static_cast<int64_t>(group)).t()));
  }
  parts.push_back(at::zeros({x.size(0) - first, weight.size(1)}, x.options()));
  return at::cat(parts);
}

struct BlockCase {
  int64_t in, out;
  std::vector<int64_t> sizes;
  int64_t behind = 0;  ///< rows that are of no group
};

class ProductBlocks : public ::testing::TestWithParam<at::ScalarType> {
 protected:
  void SetUp() override {
    if (!multiplies_blocks(at::empty({0}, GetParam()))) GTEST_SKIP() << "this processor multiplies otherwise";
  }
  at::Tensor rows_of(const BlockCase& c) const { return random({std::accumulate(c.sizes.begin(), c.sizes.end(), c.behind), c.in}, GetParam(), 1); }
  at::Tensor weight_of(const BlockCase& c) const { return random({static_cast<int64_t>(c.sizes.size()), c.out, c.in}, GetParam(), 2); }
};

TEST_P(ProductBlocks, EqualEachGroupByItselfAtEverySize) {
  const std::vector<BlockCase> cases{
      {1, 1, {1}},                          // less than any block
      {7, 5, {3, 0, 4, 5}, 2},              // an expert without rows, rows behind
      {64, 64, {64, 64}},                   // whole blocks
      {65, 130, {0, 129, 0, 1}, 3},         // one more than blocks; nearly all on one
      {33, 344, {0, 0, 70}},                // several panels, the last of 24 columns; all on one
      {300, 17, {63, 65}},                  // columns that are filled up to 32
      {1025, 3, {5, 2}},                    // the inner dimension in two pieces
      {3, 6, {1030, 1}, 1},                 // and that of the weight's gradient
      {4, 4, {0, 0}, 3},                    // nobody has rows
      {40, 9, {2, 1, 3, 1, 5, 1, 7, 1, 9}}  // odd numbers of rows, one after the other
  };
  for (const BlockCase& c : cases) {
    SCOPED_TRACE(c10::str("in ", c.in, ", out ", c.out, ", groups ", c.sizes));
    expect_same([&](const auto& in) { return grouped_linear(in[0], in[1], c.sizes); }, [&](const auto& in) { return each_group(in[0], in[1], c.sizes); },
                {rows_of(c), weight_of(c)}, GetParam() == at::kFloat ? 4e-6 : 1e-2);
  }
}

/// As they come from a transposition, and from a sum.
TEST_P(ProductBlocks, TakeGradientsOfAnyStrides) {
  const BlockCase c{10, 6, {3, 5}};
  const at::Tensor factor = random({6, 8}, GetParam(), 3);
  const auto gradients = [&](const auto& loss) {
    const at::Tensor x = rows_of(c).requires_grad_(true), weight = weight_of(c).requires_grad_(true);
    loss(grouped_linear(x, weight, c.sizes)).backward();
    return std::vector{x.grad(), weight.grad()};
  };
  const auto transposed = gradients([&](const at::Tensor& y) { return (y.t() * factor).sum(); });
  const auto straight = gradients([&](const at::Tensor& y) { return (y * factor.t().contiguous()).sum(); });
  const auto summed = gradients([&](const at::Tensor& y) { return y.sum(); });
  const auto ones = gradients([&](const at::Tensor& y) { return (y * at::ones_like(y)).sum(); });
  for (size_t i = 0; i < 2; ++i) {
    EXPECT_TRUE(at::equal(transposed[i], straight[i]));
    EXPECT_TRUE(at::equal(summed[i], ones[i]));
  }
}

/// Rows begin elsewhere, in odd places, and others follow: a group's bits are its own. Nor do they depend on threads.
TEST_P(ProductBlocks, DependOnNothingButTheGroup) {
  const at::Tensor x = random({140, 35}, GetParam(), 1), weight = random({3, 70, 35}, GetParam(), 2), dy = random({140, 70}, GetParam(), 3);
  const std::vector<int64_t> sizes{3, 130, 7}, alone{130};
  const auto of_all = [&] {
    return std::vector{multiply_groups(x, weight, true, sizes), multiply_groups(dy, weight, false, sizes), multiply_within_groups(dy, x, sizes)};
  };
  const auto all = of_all();
  const at::Tensor own = weight.narrow(0, 1, 1).clone(), rows = x.narrow(0, 3, 130).clone(), grads = dy.narrow(0, 3, 130).clone();
  EXPECT_TRUE(at::equal(all[0].narrow(0, 3, 130), multiply_groups(rows, own, true, alone)));
  EXPECT_TRUE(at::equal(all[1].narrow(0, 3, 130), multiply_groups(grads, own, false, alone)));
  EXPECT_TRUE(at::equal(all[2].select(0, 1), multiply_within_groups(grads, rows, alone).select(0, 0)));
  expect_thread_independent(of_all);
}

/// Blocks are filled up with zeros: not with what lies beside them.
TEST_P(ProductBlocks, AreNotReachedByTheirNeighboursNaN) {
  const std::vector<int64_t> sizes{5, 3};
  const at::Tensor x = random({9, 7}, GetParam(), 1), weight = random({2, 5, 7}, GetParam(), 2), dy = random({9, 5}, GetParam(), 3);
  for (const at::Tensor& tensor : {x, dy}) tensor.narrow(0, 5, 4).fill_(std::numeric_limits<double>::quiet_NaN());
  weight.select(0, 1).fill_(std::numeric_limits<double>::quiet_NaN());
  EXPECT_TRUE(at::isfinite(multiply_groups(x, weight, true, sizes).narrow(0, 0, 5)).all().item<bool>());
  EXPECT_TRUE(at::isfinite(multiply_groups(dy, weight, false, sizes).narrow(0, 0, 5)).all().item<bool>());
  EXPECT_TRUE(at::isfinite(multiply_within_groups(dy, x, sizes).select(0, 0)).all().item<bool>());
}

/// Whatever the load, and where a row is no whole cache line.
TEST_P(ProductBlocks, TakeTheMemoryThatADryRunSees) {
  const auto peak = [&](at::Device device, const std::vector<int64_t>& sizes) {
    MemoryTracker tracker;
    const TrackMemory track(tracker);
    const at::Tensor x = random({41, 13}, GetParam(), 1).to(device).requires_grad_(true),
                     weight = random({3, 9, 13}, GetParam(), 2).to(device).requires_grad_(true);
    grouped_linear(x, weight, sizes).backward(at::empty({41, 9}, x.options().requires_grad(false)).zero_());
    return tracker.peak();
  };
  const auto planned = peak(at::kMeta, {14, 14, 13});
  for (const std::vector<int64_t>& sizes : {std::vector<int64_t>{14, 14, 13}, {41, 0, 0}, {1, 2, 38}}) EXPECT_EQ(peak(at::kCPU, sizes), planned);
}

INSTANTIATE_TEST_SUITE_P(Types, ProductBlocks, ::testing::Values(at::kFloat, at::kBFloat16));

/// The same words from every instruction set.
TEST(Panels, AreTheSameFromEveryInstructionSet) {
  const auto words = [](const cpu::Loops& table, at::ScalarType dtype, int64_t inner, int64_t outer, int which) {
    const at::Tensor from = random(which == 1 ? at::IntArrayRef{outer, inner} : at::IntArrayRef{inner, outer}, dtype, 7);
    const at::Tensor to = at::zeros({(inner + 1) * (outer + 64)}, at::kInt);
    const cpu::Panel args{.from = {from.const_data_ptr(), dtype == at::kFloat ? cpu::Type::Float : cpu::Type::BFloat16},
                          .stride = from.stride(0),
                          .inner = inner,
                          .outer = outer,
                          .to = to.data_ptr()};
    (which == 0 ? table.panel_of_rows : which == 1 ? table.panel_of_columns : table.rows_of_columns)(args);
    return to;
  };
  for (const auto dtype : {at::kFloat, at::kBFloat16}) {
    for (const auto& [inner, outer] : {std::pair<int64_t, int64_t>{1, 1}, {5, 3}, {16, 64}, {33, 81}, {2, 130}}) {
      for (const int which : {0, 1, 2}) {
        EXPECT_TRUE(at::equal(words(cpu::loops(), dtype, inner, outer, which), words(*cpu::loops_baseline(), dtype, inner, outer, which)))
            << dtype << " " << inner << " x " << outer << ", way " << which;
      }
    }
  }
}

}  // namespace
}  // namespace tessera::kernels
