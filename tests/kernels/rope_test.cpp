#include "tessera/kernels/rope.h"

#include "tessera/core/error.h"
#include "tessera/kernels/reference.h"
#include "tessera/memory/memory.h"
#include "tests/kernels/support.h"

namespace tessera::kernels {
namespace {

using namespace tessera::testing_support;

std::pair<at::Tensor, at::Tensor> tables(int64_t tokens, int64_t half, int64_t first = 0) {
  const at::Tensor frequency = at::pow(10000.0, -at::arange(half, at::kDouble) / static_cast<double>(half));
  const at::Tensor angle = at::outer(at::arange(first, first + tokens, at::kDouble), frequency);
  return {angle.cos().to(at::kFloat), angle.sin().to(at::kFloat)};
}

class Rope : public ::testing::TestWithParam<std::tuple<at::ScalarType, std::vector<int64_t>>> {};

TEST_P(Rope, EqualsTheReferenceInDoublePrecision) {
  const auto& [dtype, shape] = GetParam();
  const auto [cos, sin] = tables(shape[1], shape[3] / 2);
  expect_same([&, c = cos, s = sin](const auto& in) { return rope(in[0], c, s); },
              [&, c = cos.to(at::kDouble), s = sin.to(at::kDouble)](const auto& in) { return reference::rope(in[0], c, s); }, {random(shape, dtype)},
              tolerance(dtype));
}

INSTANTIATE_TEST_SUITE_P(Shapes, Rope,
                         ::testing::Combine(::testing::Values(at::kFloat, at::kBFloat16),
                                            ::testing::Values(std::vector<int64_t>{1, 1, 1, 2}, std::vector<int64_t>{2, 7, 3, 64},
                                                              std::vector<int64_t>{1, 5, 2, 34}, std::vector<int64_t>{0, 5, 2, 8})));

TEST(Rope, PairsFeatureWithTheOneHalfAHeadAway) {
  // A quarter turn of (x1, x2) is (-x2, x1); the pair of feature 0 is feature 2 of 4.
  const at::Tensor x = at::tensor({1.0f, 2.0f, 3.0f, 4.0f}).view({1, 1, 1, 4});
  const at::Tensor cos = at::zeros({1, 2}), sin = at::ones({1, 2});
  EXPECT_TRUE(at::equal(rope(x, cos, sin).flatten(), at::tensor({-3.0f, -4.0f, 1.0f, 2.0f})));
}

TEST(Rope, EachSampleMayHaveItsOwnTable) {
  const at::Tensor x = random({2, 5, 3, 8});
  const auto [cos0, sin0] = tables(5, 4);
  const auto [cos1, sin1] = tables(5, 4, 11);
  const at::Tensor out = rope(x, at::stack({cos0, cos1}), at::stack({sin0, sin1}));
  EXPECT_TRUE(at::equal(out[0], rope(x.slice(0, 0, 1), cos0, sin0)[0]));
  EXPECT_TRUE(at::equal(out[1], rope(x.slice(0, 1, 2), cos1, sin1)[0]));
}

TEST(Rope, AViewOfAPackedProductIsNotCopied) {
  const at::Tensor packed = random({2, 6, 3 * 32});
  const at::Tensor query = packed.narrow(-1, 32, 32).view({2, 6, 4, 8});
  const auto [cos, sin] = tables(6, 4);
  track_device(packed.device().type());
  MemoryTracker tracker;
  const TrackMemory track(tracker);
  const at::Tensor out = rope(query, cos, sin);
  EXPECT_EQ(tracker.peak(), out.numel() * 4);
  EXPECT_TRUE(at::equal(out, rope(query.contiguous(), cos, sin)));
}

TEST(Rope, FeaturesNeedNotLieSideBySide) {
  const at::Tensor x = random({2, 8, 3, 6}).transpose(1, 3);  // [2, 6, 3, 8], a feature every 18 elements
  const auto [cos, sin] = tables(6, 4);
  EXPECT_TRUE(at::equal(rope(x, cos, sin), rope(x.contiguous(), cos, sin)));
}

TEST(Rope, RefusesTablesOfAnotherLength) {
  const auto [cos, sin] = tables(4, 4);
  EXPECT_THAT(message_of<ConfigError>([c = cos, s = sin] { rope(random({1, 5, 2, 8}), c, s); }), ::testing::HasSubstr("must be fp32 [5, 4]"));
  EXPECT_THAT(message_of<ConfigError>([c = cos, s = sin] { rope(random({1, 4, 2, 7}), c, s); }), ::testing::HasSubstr("even number of features"));
}

}  // namespace
}  // namespace tessera::kernels
