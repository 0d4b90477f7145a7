#include "tessera/kernels/attention.h"

#include "tessera/core/error.h"
#include "tessera/kernels/reference.h"
#include "tessera/memory/memory.h"
#include "tests/kernels/support.h"
#include "tests/test_device.h"

namespace tessera::kernels {
namespace {

using namespace tessera::testing_support;

struct Shape {
  int64_t batch, heads, kv_heads, queries, keys, dim;
};

class Attention : public ::testing::TestWithParam<std::tuple<at::ScalarType, bool, Shape>> {};

/// [B, H, S, D] as the transposed view that a projection gives.
at::Tensor heads_view(int64_t batch, int64_t heads, int64_t tokens, int64_t dim, at::ScalarType dtype, uint64_t seed) {
  return random({batch, tokens, heads, dim}, dtype, seed).transpose(1, 2);
}

TEST_P(Attention, EqualsTheReferenceInDoublePrecision) {
  const auto& [dtype, causal, s] = GetParam();
  expect_same([c = causal](const auto& in) { return flash_attention(in[0], in[1], in[2], c); },
              [c = causal](const auto& in) { return reference::attention(in[0], in[1], in[2], c); },
              {heads_view(s.batch, s.heads, s.queries, s.dim, dtype, 1), heads_view(s.batch, s.kv_heads, s.keys, s.dim, dtype, 2),
               heads_view(s.batch, s.kv_heads, s.keys, s.dim, dtype, 3)},
              dtype == at::kFloat ? 5e-6 : 2e-2);
}

INSTANTIATE_TEST_SUITE_P(Shapes, Attention,
                         ::testing::Combine(::testing::Values(at::kFloat, at::kBFloat16), ::testing::Bool(),
                                            ::testing::Values(Shape{1, 1, 1, 1, 1, 8}, Shape{2, 6, 2, 33, 33, 16}, Shape{1, 4, 4, 200, 200, 64},
                                                              Shape{2, 4, 1, 5, 17, 24})));

TEST(Attention, WithoutTokensIsLibtorchs) {
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
    for (const auto& [queries, keys] : {std::pair<int64_t, int64_t>{0, 5}, {5, 0}, {0, 0}}) {
      const at::Tensor q = heads_view(2, 4, queries, 8, dtype, 1).requires_grad_(), k = heads_view(2, 2, keys, 8, dtype, 2).requires_grad_();
      const at::Tensor out = flash_attention(q, k, k, false);
      EXPECT_TRUE(at::equal(out, at::scaled_dot_product_attention(q, k, k, {}, 0, false, {}, /*enable_gqa=*/true)));
      out.sum().backward();
      EXPECT_TRUE(at::equal(q.grad(), at::zeros_like(q)) && at::equal(k.grad(), at::zeros_like(k)));
      const auto forward = flash_attention_forward(q, k, k, false);
      EXPECT_TRUE(at::equal(forward.output, out));
      EXPECT_TRUE(at::equal(forward.log_sum_exp, at::full({2, 4, queries}, -std::numeric_limits<float>::infinity())));
      const auto [dq, dk, dv] = flash_attention_backward(at::ones_like(out), q, k, k, forward, false);
      EXPECT_TRUE(at::equal(dq, q.grad()) && at::equal(dk, k.grad()) && at::equal(dv, k.grad()));
    }
  }
}

TEST(Attention, LogSumExpAndBackwardBlocksMergeToTheWhole) {
  // Keys in two blocks, merged by their log-sum-exps: what ring attention does.
  const at::Tensor q = heads_view(1, 2, 9, 8, at::kFloat, 1), k = heads_view(1, 2, 12, 8, at::kFloat, 2), v = heads_view(1, 2, 12, 8, at::kFloat, 3);
  const auto whole = flash_attention_forward(q, k, v, false);
  const auto first = flash_attention_forward(q, k.narrow(2, 0, 5), v.narrow(2, 0, 5), false);
  const auto second = flash_attention_forward(q, k.narrow(2, 5, 7), v.narrow(2, 5, 7), false);
  const at::Tensor lse = at::logaddexp(first.log_sum_exp, second.log_sum_exp);
  expect_close(lse, whole.log_sum_exp, 1e-6, "log-sum-exp");
  const at::Tensor merged = first.output * (first.log_sum_exp - lse).exp().unsqueeze(-1) + second.output * (second.log_sum_exp - lse).exp().unsqueeze(-1);
  expect_close(merged, whole.output, 2e-6, "output");

  const at::Tensor grad = random({1, 9, 2, 8}, at::kFloat, 4).transpose(1, 2);
  const auto [dq, dk, dv] = flash_attention_backward(grad, q, k, v, whole, false);
  const AttentionOutput global{whole.output, whole.log_sum_exp};
  const auto [dq1, dk1, dv1] = flash_attention_backward(grad, q, k.narrow(2, 0, 5), v.narrow(2, 0, 5), global, false);
  const auto [dq2, dk2, dv2] = flash_attention_backward(grad, q, k.narrow(2, 5, 7), v.narrow(2, 5, 7), global, false);
  expect_close(dq1 + dq2, dq, 2e-6, "dq");
  expect_close(at::cat({dk1, dk2}, 2), dk, 2e-6, "dk");
  expect_close(at::cat({dv1, dv2}, 2), dv, 2e-6, "dv");
}

/// Of tiles nobody but us pads the features to the whole vectors that CUDA's kernels read.
TEST(Attention, TilesOfAnyFeaturesAreTheWhole) {
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
    const double bound = dtype == at::kFloat ? 5e-6 : 2e-2;
    for (const int64_t features : {1, 6, 10, 12, 16}) {
      for (const std::optional<double> scale : {std::optional<double>(), std::optional(0.3)}) {
        const at::Tensor q = heads_view(2, 4, 9, features, dtype, 1).requires_grad_(), k = heads_view(2, 2, 9, features, dtype, 2).requires_grad_(),
                         v = heads_view(2, 2, 9, features, dtype, 3).requires_grad_(), grad = heads_view(2, 4, 9, features, dtype, 4);
        const at::Tensor whole = reference::attention(q, k, v, true, scale);
        whole.backward(grad);
        const auto tile = flash_attention_forward(q, k, v, true, scale);
        const std::string name = detail::concat(features, " features in ", dtype);
        expect_close(tile.output, whole, bound, name);
        EXPECT_TRUE(tile.output.transpose(1, 2).is_contiguous()) << name;
        const auto [dq, dk, dv] = flash_attention_backward(grad, q, k, v, tile, true, scale);
        expect_close(dq, q.grad(), bound, "dq of " + name);
        expect_close(dk, k.grad(), bound, "dk of " + name);
        expect_close(dv, v.grad(), bound, "dv of " + name);
      }
    }
  }
}

TEST(Attention, RefusesTilesOfMoreFeaturesThanFlashHas) {
  const auto tile = [](int64_t features, at::ScalarType dtype) {
    const at::Tensor q = heads_view(1, 1, 3, features, dtype, 1);
    flash_attention_forward(q, q, q, true);
  };
  tile(256, at::kBFloat16);
  tile(264, at::kFloat);
  if (!testing_support::test_device().is_cuda()) return;
  EXPECT_THAT(message_of<ConfigError>([&] { tile(257, at::kBFloat16); }),
              ::testing::AllOf(::testing::HasSubstr("heads of 257 features in BFloat16"), ::testing::HasSubstr("precision.compute = fp32")));
}

TEST(Attention, ResultFlattensToTokensWithoutACopy) {
  const at::Tensor q = heads_view(2, 3, 5, 8, at::kFloat, 1);
  const at::Tensor out = flash_attention(q, q, q, true);
  EXPECT_TRUE(out.transpose(1, 2).is_contiguous());
}

TEST(Attention, RefusesHeadsThatCannotBeGrouped) {
  const at::Tensor q = random({1, 5, 4, 8}), k = random({1, 2, 4, 8});
  EXPECT_THAT(message_of<ConfigError>([&] { flash_attention(q, k, k, true); }), ::testing::HasSubstr("5 heads cannot be dealt over 2"));
}

/// On CUDA no fused kernel takes grouped heads in fp32, and libtorch would multiply them out.
TEST(Attention, GroupedHeadsNeedNoScoresInMemory) {
  constexpr int64_t tokens = 1024;
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
    const at::Tensor q = heads_view(1, 4, tokens, 8, dtype, 1).requires_grad_(), k = heads_view(1, 2, tokens, 8, dtype, 2).requires_grad_();
    track_device(q.device().type());
    MemoryTracker tracker;
    const TrackMemory track(tracker);
    flash_attention(q, k, k, true).sum().backward();
    EXPECT_LT(tracker.peak(), tokens * tokens * static_cast<int64_t>(q.element_size())) << dtype << ": the scores of one head";
    EXPECT_EQ(k.grad().sizes(), k.sizes());
  }
}

/// Heads out of a convolution have a feature every so many elements.
TEST(Attention, FeaturesNeedNotLieSideBySide) {
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
    const auto strided = [&](uint64_t seed) { return random({2, 3, 8, 7}, dtype, seed).transpose(2, 3).requires_grad_(); };
    const at::Tensor q = strided(1), k = strided(2), v = strided(3), weight = random({2, 3, 7, 8}, dtype, 4);
    const auto plain = [](const at::Tensor& x) { return x.detach().contiguous().requires_grad_(); };
    const at::Tensor q2 = plain(q), k2 = plain(k), v2 = plain(v);
    const at::Tensor got = flash_attention(q, k, v, true, {}), want = flash_attention(q2, k2, v2, true, {});
    EXPECT_TRUE(at::allclose(got, want, 1e-5, 1e-6)) << dtype;
    (got * weight).sum().backward();
    (want * weight).sum().backward();
    for (const auto& [x, y] : {std::pair(q, q2), {k, k2}, {v, v2}}) EXPECT_TRUE(at::allclose(x.grad(), y.grad(), 1e-5, 1e-6)) << dtype;
  }
}

}  // namespace
}  // namespace tessera::kernels
