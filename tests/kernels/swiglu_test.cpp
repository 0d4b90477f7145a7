#include "tessera/kernels/swiglu.h"

#include "tessera/core/error.h"
#include "tessera/kernels/reference.h"
#include "tessera/memory/memory.h"
#include "tests/kernels/support.h"

namespace tessera::kernels {
namespace {

using namespace tessera::testing_support;

const Operator fused = [](const std::vector<at::Tensor>& in) { return swiglu(in[0], in[1]); };
const Operator reference = [](const std::vector<at::Tensor>& in) { return reference::swiglu(in[0], in[1]); };

class SwiGlu : public ::testing::TestWithParam<std::tuple<at::ScalarType, std::vector<int64_t>>> {};

TEST_P(SwiGlu, EqualsTheReferenceInDoublePrecision) {
  const auto& [dtype, shape] = GetParam();
  expect_same(fused, reference, {random(shape, dtype, 1) * 4, random(shape, dtype, 2)}, tolerance(dtype));
}

INSTANTIATE_TEST_SUITE_P(Shapes, SwiGlu,
                         ::testing::Combine(::testing::Values(at::kFloat, at::kBFloat16),
                                            ::testing::Values(std::vector<int64_t>{1, 1}, std::vector<int64_t>{3, 257}, std::vector<int64_t>{257, 1},
                                                              std::vector<int64_t>{2, 5, 40}, std::vector<int64_t>{7}, std::vector<int64_t>{0, 4})));

TEST(SwiGlu, SaturatesInsteadOfOverflowing) {
  const at::Tensor gate = at::tensor({-1000.0f, -100.0f, -88.0f, 0.0f, 88.0f, 1000.0f}), up = at::ones({6});
  const auto e = evaluate(fused, {gate, up}, at::ones({6}));
  expect_close(e.result, reference::swiglu(gate, up), 1e-6, "extremes");
  EXPECT_TRUE(e.gradients[0].isfinite().all().item().toBool());
  EXPECT_TRUE(std::isnan(swiglu(at::full({1}, NAN), at::ones({1})).item().toFloat()));
}

TEST(SwiGlu, HalvesOfAPackedProductAreNotCopied) {
  const auto halves = random({64, 2 * 48}).chunk(2, -1);
  track_device(halves[0].device().type());
  MemoryTracker tracker;
  const TrackMemory track(tracker);
  const at::Tensor out = swiglu(halves[0], halves[1]);
  EXPECT_EQ(tracker.peak(), out.numel() * 4);
  expect_same(fused, reference, {halves[0], halves[1]}, tolerance(at::kFloat));
}

TEST(SwiGlu, GateAndUpMayHaveOtherStrides) {
  const at::Tensor gate = random({7, 3 * 40}, at::kFloat, 1).narrow(1, 40, 40), up = random({7, 2 * 40}, at::kFloat, 2).narrow(1, 40, 40);
  expect_same(fused, reference, {gate, random({7, 40}, at::kFloat, 3)}, tolerance(at::kFloat));
  expect_same(fused, reference, {gate, up}, tolerance(at::kFloat));
}

TEST(SwiGlu, RefusesDifferentShapes) {
  EXPECT_THAT(message_of<ConfigError>([] { swiglu(random({2, 3}), random({2, 4})); }), ::testing::HasSubstr("one shape and dtype"));
}

}  // namespace
}  // namespace tessera::kernels
