#include "tessera/kernels/attention_blocks.h"

#include <fstream>

#include <ATen/Parallel.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu_backward.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu_backward_native.h>
#include <unistd.h>

#include "tessera/kernels/attention.h"
#include "tessera/kernels/product_blocks.h"
#include "tessera/memory/memory.h"
#include "tests/kernels/support.h"

namespace tessera::kernels {
namespace {

using namespace tessera::testing_support;

using Tensors = std::vector<at::Tensor>;

struct AttentionCase {
  int64_t batch, heads, kv_heads, queries, keys, dim;
};

/// AttentionInputs of a backward pass, each head a view as a projection gives it.
struct AttentionInputs {
  AttentionInputs(const AttentionCase& c, at::ScalarType dtype, bool causal) : causal(causal) {
    const auto heads = [&](int64_t count, int64_t tokens, uint64_t seed) { return random({c.batch, tokens, count, c.dim}, dtype, seed).transpose(1, 2); };
    q = heads(c.heads, c.queries, 1), k = heads(c.kv_heads, c.keys, 2), v = heads(c.kv_heads, c.keys, 3), dy = heads(c.heads, c.queries, 4);
    std::tie(y, log_sum_exp) = at::_scaled_dot_product_flash_attention_for_cpu(q, k, v, 0, causal);
  }
  Tensors in_blocks() const { return all(attention_backward_in_blocks(dy, q, k, v, y, log_sum_exp, causal, {})); }
  Tensors libtorchs() const { return all(at::native::_scaled_dot_product_flash_attention_cpu_backward(dy, q, k, v, y, log_sum_exp, 0, causal, {}, {})); }
  /// By their definition, in fp64.
  Tensors exact() const {
    const at::Tensor wide_q = q.to(at::kDouble).detach().requires_grad_(), wide_k = k.to(at::kDouble).detach().requires_grad_(),
                     wide_v = v.to(at::kDouble).detach().requires_grad_();
    const int64_t group = q.size(1) / k.size(1);
    at::Tensor scores = at::matmul(wide_q, wide_k.repeat_interleave(group, 1).transpose(2, 3)) / std::sqrt(static_cast<double>(q.size(3)));
    if (causal) scores = scores.masked_fill(at::ones({q.size(2), k.size(2)}, at::kBool).triu(1), -std::numeric_limits<double>::infinity());
    at::matmul(at::softmax(scores, -1), wide_v.repeat_interleave(group, 1)).backward(dy.to(at::kDouble));
    return {wide_q.grad(), wide_k.grad(), wide_v.grad()};
  }
  static Tensors all(const std::tuple<at::Tensor, at::Tensor, at::Tensor>& three) { return {std::get<0>(three), std::get<1>(three), std::get<2>(three)}; }

  at::Tensor q, k, v, dy, y, log_sum_exp;
  bool causal;
};

double distance(const at::Tensor& x, const at::Tensor& exact) {
  return ((x.to(at::kDouble) - exact).abs().max() / exact.abs().max().clamp_min(1e-3)).item<double>();
}

class AttentionBlocks : public ::testing::TestWithParam<std::tuple<at::ScalarType, bool, AttentionCase>> {
 protected:
  void SetUp() override {
    if (!multiplies_blocks(at::zeros({1}, std::get<0>(GetParam())))) GTEST_SKIP() << "no AVX-512, or no bf16 products";
  }
};

/// No farther from fp64 than libtorch's kernel is, but for the last bits of another order of sums.
TEST_P(AttentionBlocks, AreAsNearToTheExactGradientsAsLibtorchs) {
  const auto& [dtype, causal, sizes] = GetParam();
  const AttentionInputs in(sizes, dtype, causal);
  const Tensors exact = in.exact(), ours = in.in_blocks(), theirs = in.libtorchs();
  for (size_t i = 0; i < 3; ++i) {
    EXPECT_LE(distance(ours[i], exact[i]), 1.5 * distance(theirs[i], exact[i]) + (dtype == at::kFloat ? 1e-6 : 3e-3)) << "dq, dk, dv"[4 * i + 1];
    EXPECT_EQ(ours[i].strides(), theirs[i].strides());
    EXPECT_EQ(ours[i].scalar_type(), dtype);
  }
}

INSTANTIATE_TEST_SUITE_P(Cases, AttentionBlocks,
                         ::testing::Combine(::testing::Values(at::kFloat, at::kBFloat16), ::testing::Bool(),
                                            ::testing::Values(AttentionCase{1, 1, 1, 1, 1, 2}, AttentionCase{2, 2, 2, 64, 64, 16},
                                                              AttentionCase{1, 4, 2, 130, 130, 80}, AttentionCase{2, 2, 2, 33, 200, 24},
                                                              AttentionCase{1, 6, 2, 201, 71, 130}, AttentionCase{1, 3, 1, 65, 129, 6},
                                                              AttentionCase{1, 2, 1, 600, 1100, 16}, AttentionCase{1, 1, 1, 1100, 530, 16})));

/// Each case on its own, and each head: what else there is, and who computes it, changes no bit.
TEST(AttentionInBlocks, HaveBitsOfTheirHeadAlone) {
  const int threads = at::get_num_threads();
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
    const AttentionInputs in({3, 4, 2, 150, 150, 32}, dtype, true);
    if (!multiplies_blocks(in.q)) GTEST_SKIP();
    at::set_num_threads(1);
    const Tensors alone = in.in_blocks();
    at::set_num_threads(4);
    const Tensors together = in.in_blocks();
    at::set_num_threads(threads);
    AttentionInputs last = in;
    for (at::Tensor* x : {&last.q, &last.k, &last.v, &last.dy, &last.y, &last.log_sum_exp}) *x = x->narrow(0, 2, 1).narrow(1, x->size(1) / 2, x->size(1) / 2);
    const Tensors part = last.in_blocks();
    for (size_t i = 0; i < 3; ++i) {
      EXPECT_TRUE(at::equal(alone[i], together[i]));
      EXPECT_TRUE(at::equal(alone[i].narrow(0, 2, 1).narrow(1, alone[i].size(1) / 2, alone[i].size(1) / 2), part[i]));
    }
  }
}

/// The operator itself has this kernel, whoever calls it; what it does not take, a mask, goes to libtorch's.
TEST(AttentionInBlocks, AreThoseOfTheOperator) {
  const AttentionInputs in({1, 2, 2, 70, 70, 16}, at::kFloat, false);
  if (!multiplies_blocks(in.q)) GTEST_SKIP();
  const auto called = AttentionInputs::all(at::_scaled_dot_product_flash_attention_for_cpu_backward(in.dy, in.q, in.k, in.v, in.y, in.log_sum_exp, 0, false));
  const Tensors ours = in.in_blocks();
  for (size_t i = 0; i < 3; ++i) EXPECT_TRUE(at::equal(called[i], ours[i]));

  const at::Tensor mask = random({1, 1, 70, 70}, at::kFloat, 9);
  const auto taken = [](const AttentionInputs& x, double dropout = 0, const std::optional<at::Tensor>& by = {}) {
    return attends_in_blocks(x.dy, x.q, x.k, x.v, x.y, x.log_sum_exp, dropout, by);
  };
  EXPECT_TRUE(taken(in));
  EXPECT_FALSE(taken(in, 0, mask));
  EXPECT_FALSE(taken(in, 0.5));
  EXPECT_FALSE(taken(AttentionInputs({1, 2, 2, 70, 70, 15}, at::kBFloat16, false))) << "half a word";
  const auto [y, sums] = at::_scaled_dot_product_flash_attention_for_cpu(in.q, in.k, in.v, 0, false, mask);
  const auto masked = AttentionInputs::all(at::_scaled_dot_product_flash_attention_for_cpu_backward(in.dy, in.q, in.k, in.v, y, sums, 0, false, mask));
  const auto theirs = AttentionInputs::all(at::native::_scaled_dot_product_flash_attention_cpu_backward(in.dy, in.q, in.k, in.v, y, sums, 0, false, mask));
  for (size_t i = 0; i < 3; ++i) EXPECT_TRUE(at::equal(masked[i], theirs[i]));
}

/// A program that merges results itself may mix types: libtorch's kernel refuses that in its words, and nothing is read as what it is not.
TEST(AttentionInBlocks, OfOtherTypesAreRefused) {
  const AttentionInputs in({1, 2, 2, 40, 40, 16}, at::kBFloat16, true);
  if (!multiplies_blocks(in.q)) GTEST_SKIP();
  for (at::Tensor AttentionInputs::* x : {&AttentionInputs::dy, &AttentionInputs::k, &AttentionInputs::v, &AttentionInputs::y, &AttentionInputs::log_sum_exp}) {
    AttentionInputs other = in;
    other.*x = (other.*x).to((other.*x).scalar_type() == at::kFloat ? at::kDouble : at::kFloat);
    EXPECT_ANY_THROW(flash_attention_backward(other.dy, other.q, other.k, other.v, {other.y, other.log_sum_exp}, true));
  }
}

/// Sequences of any length: oneDNN's programs, which libtorch keeps for good, are made for a few shapes alone.
TEST(AttentionInBlocks, KeepNoMemoryForEachLength) {
  const auto pass = [](int64_t length) { AttentionInputs({1, 1, 1, length, length + 7, 64}, at::kFloat, true).in_blocks(); };
  if (!multiplies_blocks(at::zeros({1}))) GTEST_SKIP();
  pass(64);
  const int64_t before = resident_bytes();
  for (int64_t length = 33; length < 160; ++length) pass(length);
  EXPECT_LT(resident_bytes() - before, int64_t{100} << 20);
}

/// What is planned for a sequence, or a window of several, is enough for shorter ones, of which some are filled up.
TEST(AttentionInBlocks, TakeNoMoreOfShorterSequences) {
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
    if (!multiplies_blocks(at::zeros({1}, dtype))) GTEST_SKIP();
    const auto peak = [&](int64_t queries, int64_t keys) {
      const auto meta = [&](int64_t tokens) { return at::empty({1, tokens, 2, 8}, at::TensorOptions(dtype).device(at::kMeta)).transpose(1, 2); };
      const at::Tensor q = meta(queries), k = meta(keys), sums = at::empty({1, 2, queries}, at::TensorOptions(at::kFloat).device(at::kMeta));
      MemoryTracker tracker;
      const TrackMemory tracking(tracker);
      attention_backward_in_blocks(q, q, k, k, q, sums, /*causal=*/false, {});
      return tracker.peak();
    };
    for (int64_t length = 1; length < 600; ++length) {
      EXPECT_LE(peak(64, length), peak(64, length + 1)) << length << " keys";
      EXPECT_LE(peak(length, 64), peak(length + 1, 64)) << length << " queries";
    }
  }
}

/// As partial results are merged: a query whose keys are all elsewhere has no log-sum-exp here.
TEST(AttentionInBlocks, OfAQueryThatSawNoKeyAreZero) {
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
    AttentionInputs in({1, 2, 2, 20, 30, 16}, dtype, false);
    if (!multiplies_blocks(in.q)) GTEST_SKIP();
    in.log_sum_exp = in.log_sum_exp.clone();
    in.log_sum_exp.select(2, 3).fill_(-std::numeric_limits<float>::infinity());
    const Tensors got = in.in_blocks();
    EXPECT_TRUE(at::equal(got[0].select(2, 3), at::zeros_like(got[0].select(2, 3))));
    AttentionInputs without = in;
    for (at::Tensor* x : {&without.q, &without.dy, &without.y, &without.log_sum_exp}) *x = at::cat({x->narrow(2, 0, 3), x->narrow(2, 4, 16)}, 2);
    const Tensors want = without.in_blocks();
    expect_close(got[1], want[1], dtype == at::kFloat ? 1e-6 : 1e-2, "dk");
    expect_close(got[2], want[2], dtype == at::kFloat ? 1e-6 : 1e-2, "dv");
  }
}

/// The gradient of a sum is one number for all elements, that of a mean over tokens one row; and a program's scale is its own.
TEST(AttentionInBlocks, TakeExpandedGradientsAndAScale) {
  AttentionInputs in({2, 2, 1, 70, 70, 16}, at::kFloat, true);
  if (!multiplies_blocks(in.q)) GTEST_SKIP();
  for (const at::Tensor& dy : {at::ones({1, 1, 1, 1}).expand(in.q.sizes()), random({2, 2, 1, 16}, at::kFloat, 5).expand(in.q.sizes())}) {
    const auto got = AttentionInputs::all(attention_backward_in_blocks(dy, in.q, in.k, in.v, in.y, in.log_sum_exp, true, 0.3));
    const auto want = AttentionInputs::all(attention_backward_in_blocks(dy.contiguous(), in.q, in.k, in.v, in.y, in.log_sum_exp, true, 0.3));
    const auto theirs = AttentionInputs::all(
        at::native::_scaled_dot_product_flash_attention_cpu_backward(dy.contiguous(), in.q, in.k, in.v, in.y, in.log_sum_exp, 0, true, {}, 0.3));
    for (size_t i = 0; i < 3; ++i) {
      EXPECT_TRUE(at::equal(got[i], want[i]));
      expect_close(got[i], theirs[i], 2e-5, "gradient");
    }
  }
}

}  // namespace
}  // namespace tessera::kernels
