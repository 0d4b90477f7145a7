#include "tessera/kernels/cross_entropy.h"

#include <bit>
#include <cstdint>

#include <torch/csrc/autograd/autograd.h>

#include "tessera/core/error.h"
#include "tessera/kernels/linear_cross_entropy.h"
#include "tessera/kernels/reference.h"
#include "tests/kernels/support.h"
#include "tests/test_device.h"

namespace tessera::kernels {
namespace {

using namespace tessera::testing_support;

/// Labels of which every `ignored_every`-th is -100 (0: none).
at::Tensor labels_of(int64_t tokens, int64_t vocabulary, int64_t ignored_every) {
  auto generator = at::detail::createCPUGenerator(5);
  at::Tensor labels = at::randint(vocabulary, {tokens}, generator, at::kLong);
  if (ignored_every > 0) labels.slice(0, 0, tokens, ignored_every).fill_(kIgnoredLabel);
  return labels;
}

struct Problem {
  int64_t tokens, dim, vocabulary, chunk, ignored_every;
};

/// Label smoothing and z-loss: none, each, both, and a target without its label.
constexpr CrossEntropyOptions kLosses[] = {{}, {.label_smoothing = 0.1}, {.z_loss = 0.02}, {.label_smoothing = 0.3, .z_loss = 1e-3}, {.label_smoothing = 1}};

class CrossEntropy : public ::testing::TestWithParam<std::tuple<at::ScalarType, Problem>> {};

TEST_P(CrossEntropy, OfLogitsEqualsTheReferenceInDoublePrecision) {
  const auto& [dtype, p] = GetParam();
  const at::Tensor labels = labels_of(p.tokens, p.vocabulary, p.ignored_every);
  for (const auto& loss : kLosses) {
    expect_same([&](const auto& in) { return cross_entropy_sum(in[0], labels, loss); },
                [&](const auto& in) { return reference::cross_entropy_sum(in[0], labels, loss); }, {random({p.tokens, p.vocabulary}, dtype) * 3},
                tolerance(dtype));
  }
}

TEST_P(CrossEntropy, LinearEqualsTheReferenceInDoublePrecision) {
  const auto& [dtype, p] = GetParam();
  const at::Tensor labels = labels_of(p.tokens, p.vocabulary, p.ignored_every);
  for (const auto& loss : kLosses) {
    expect_same([&](const auto& in) { return linear_cross_entropy(in[0], in[1], labels, {.chunk_tokens = p.chunk, .loss = loss}); },
                [&](const auto& in) { return reference::linear_cross_entropy(in[0], in[1], labels, {}, loss); },
                {random({p.tokens, p.dim}, dtype), random({p.vocabulary, p.dim}, dtype, 2)}, dtype == at::kFloat ? 5e-6 : 2e-2);
  }
}

INSTANTIATE_TEST_SUITE_P(Problems, CrossEntropy,
                         ::testing::Combine(::testing::Values(at::kFloat, at::kBFloat16),
                                            ::testing::Values(Problem{1, 1, 1, 0, 0}, Problem{1, 16, 7, 1, 0}, Problem{13, 8, 7, 5, 3},
                                                              Problem{40, 24, 257, 16, 0}, Problem{9, 8, 50, 100, 1}, Problem{64, 33, 1000, 32, 5},
                                                              Problem{0, 8, 7, 4, 0})));

TEST(LinearCrossEntropy, WeightsOfFp32WithProductsInBf16) {
  const at::Tensor hidden = random({50, 32}), weight = random({129, 32}, at::kFloat, 2), labels = labels_of(50, 129, 7);
  for (const int64_t chunk : {16, 50}) {
    const auto e = evaluate([&](const auto& in) { return linear_cross_entropy(in[0], in[1], labels, {.chunk_tokens = chunk, .compute_dtype = at::kBFloat16}); },
                            {hidden, weight}, at::ones({}));
    const auto expected = evaluate([&](const auto& in) { return reference::linear_cross_entropy(in[0], in[1], labels); },
                                   {hidden.to(at::kBFloat16).to(at::kDouble), weight.to(at::kBFloat16).to(at::kDouble)}, at::ones({}));
    EXPECT_EQ(e.gradients[0].scalar_type(), at::kFloat);
    EXPECT_EQ(e.gradients[1].scalar_type(), at::kFloat);
    expect_close(e.result, expected.result, 2e-3, "loss");
    expect_close(e.gradients[0], expected.gradients[0], 2e-2, "d_hidden");
    expect_close(e.gradients[1], expected.gradients[1], 2e-2, "d_weight");
  }
}

TEST(LinearCrossEntropy, WidensWeightsOfFp16ToTheTypeOfItsProducts) {
  const at::Tensor hidden = random({13, 8}), weight = random({29, 8}, at::kFloat, 2).to(at::kHalf), labels = labels_of(13, 29, 4);
  for (const int64_t chunk : {5, 13}) {
    const auto of = [&](const at::Tensor& used) {
      return evaluate([&](const auto& in) { return linear_cross_entropy(in[0], in[1], labels, {.chunk_tokens = chunk, .compute_dtype = at::kFloat}); },
                      {hidden, used}, at::ones({}));
    };
    const auto narrow = of(weight), wide = of(weight.to(at::kFloat));
    EXPECT_TRUE(at::equal(narrow.result, wide.result));
    EXPECT_TRUE(at::equal(narrow.gradients[0], wide.gradients[0]));
    EXPECT_TRUE(at::equal(narrow.gradients[1], wide.gradients[1].to(at::kHalf)));
  }
}

TEST(LinearCrossEntropy, TheGradientThatWasExpectedChangesTheCostButNotTheResult) {
  const at::Tensor hidden = random({20, 8}), weight = random({30, 8}, at::kFloat, 2), labels = labels_of(20, 30, 4);
  const auto run = [&](double expected, double actual) {
    return evaluate([&](const auto& in) { return linear_cross_entropy(in[0], in[1], labels, {.expected_gradient = expected}); }, {hidden, weight},
                    at::full({}, actual));
  };
  const auto plain = run(1, 1);
  for (const auto& [expected, actual] : {std::pair{1.0, 1.0 / 3}, {1.0 / 3, 1.0 / 3}, {0.5, 1.0 / 3}, {1.0, 0.0}}) {
    const auto e = run(expected, actual);
    EXPECT_TRUE(at::equal(e.result, plain.result)) << "the loss itself is never scaled";
    for (int i : {0, 1})
      EXPECT_LE((e.gradients[i] - plain.gradients[i] * actual).abs().max().item().toDouble(), 2e-6 * plain.gradients[i].abs().max().item().toDouble());
  }
}

TEST(LinearCrossEntropy, GivesItsGradientsAwayWithoutACopyAndOnce) {
  const at::Tensor hidden = random({6, 4}).requires_grad_(true), weight = random({9, 4}, at::kFloat, 2).requires_grad_(true);
  const at::Tensor loss = linear_cross_entropy(hidden, weight, labels_of(6, 9, 0));
  loss.backward({}, /*retain_graph=*/true);
  EXPECT_EQ(weight.grad().use_count(), 1);
  EXPECT_THAT(message_of<std::exception>([&] { loss.backward(); }), ::testing::HasSubstr("given away by an earlier backward pass"));
}

TEST(LinearCrossEntropy, AccumulatesOverMicroBatches) {
  const at::Tensor weight = random({9, 4}, at::kFloat, 2).requires_grad_(true), labels = labels_of(6, 9, 0);
  linear_cross_entropy(random({6, 4}), weight, labels).backward();
  const at::Tensor once = weight.grad().clone();
  linear_cross_entropy(random({6, 4}), weight, labels).backward();
  EXPECT_TRUE(at::equal(weight.grad(), once * 2));
}

TEST(LinearCrossEntropy, OnlyTheLossUnderNoGrad) {
  const at::Tensor hidden = random({6, 4}).requires_grad_(true), weight = random({9, 4}, at::kFloat, 2).requires_grad_(true), labels = labels_of(6, 9, 2);
  const at::Tensor with = linear_cross_entropy(hidden, weight, labels);
  const at::NoGradGuard no_grad;
  const at::Tensor without = linear_cross_entropy(hidden, weight, labels);
  EXPECT_FALSE(without.requires_grad());
  EXPECT_TRUE(at::equal(with.detach(), without));
}

TEST(LinearCrossEntropy, BitsDoNotDependOnThreads) {
  const at::Tensor hidden = random({150, 48}), weight = random({500, 48}, at::kFloat, 2), labels = labels_of(150, 500, 11);
  for (const at::ScalarType compute : {at::kFloat, at::kBFloat16}) {
    expect_thread_independent([&] {
      const auto e = evaluate([&](const auto& in) { return linear_cross_entropy(in[0], in[1], labels, {.chunk_tokens = 64, .compute_dtype = compute}); },
                              {hidden, weight}, at::ones({}));
      return std::vector<at::Tensor>{e.result, e.gradients[0], e.gradients[1]};
    });
  }
}

TEST(LinearCrossEntropy, LargeAndInfiniteLogits) {
  const at::Tensor logits = at::tensor({1e4f, -1e4f, 0.0f, -INFINITY, 5.0f, 5.0f}).view({2, 3}), labels = at::tensor({0, 1}, at::kLong);
  const auto e = evaluate([&](const auto& in) { return cross_entropy_sum(in[0], labels); }, {logits}, at::ones({}));
  EXPECT_NEAR(e.result.item().toDouble(), std::log(2.0), 1e-6);
  expect_close(e.gradients[0], at::tensor({0.0f, 0.0f, 0.0f, 0.0f, -0.5f, 0.5f}).view({2, 3}), 1e-6, "gradient");
  EXPECT_TRUE(std::isnan(cross_entropy_sum(at::full({1, 40}, NAN), at::zeros({1}, at::kLong)).item().toDouble()));
}

/// NVIDIA's NaN has all bits of the mantissa set, others one.
TEST(LinearCrossEntropy, ANaNOfAnyBitsIsOne) {
  for (const uint32_t bits : {0x7fffffffu, 0xffffffffu, 0x7fc00000u, 0x7fc00001u, 0x7f800001u, 0x7fbfffffu}) {
    at::Tensor logits = at::zeros({1, 40});
    logits[0].narrow(0, 3, 1).fill_(std::bit_cast<float>(bits));
    const auto e = evaluate([&](const auto& in) { return cross_entropy_sum(in[0], at::zeros({1}, at::kLong)); }, {logits}, at::ones({}));
    EXPECT_TRUE(std::isnan(e.result.item().toDouble())) << std::hex << bits;
    EXPECT_TRUE(std::isnan(e.gradients[0][0][3].item().toDouble())) << std::hex << bits;
  }
}

TEST(LinearCrossEntropy, OneHotExtremesUnderSmoothingAndZLoss) {
  const at::Tensor logits = at::tensor({1e4f, 0.0f, 0.0f, 0.0f, -INFINITY, 3.0f, 3.0f, 3.0f}).view({2, 4}), labels = at::tensor({0, 1}, at::kLong);
  // The first row is certain: lse = 1e4, and of its target a quarter of eps goes to each entry. The second expects minus infinity with any smoothing.
  const at::Tensor certain = logits.narrow(0, 0, 1), first = labels.narrow(0, 0, 1);
  const auto smooth = evaluate([&](const auto& in) { return cross_entropy_sum(in[0], first, {.label_smoothing = 0.2}); }, {certain}, at::ones({}));
  EXPECT_NEAR(smooth.result.item().toDouble(), 0.2 * 0.75 * 1e4, 1e-3);
  expect_close(smooth.gradients[0], at::tensor({0.15f, -0.05f, -0.05f, -0.05f}).view({1, 4}), 1e-6, "gradient");
  const auto z = evaluate([&](const auto& in) { return cross_entropy_sum(in[0], first, {.z_loss = 1e-4}); }, {certain}, at::ones({}));
  EXPECT_NEAR(z.result.item().toDouble(), 1e4, 1e-2);
  expect_close(z.gradients[0], at::tensor({2.0f, 0.0f, 0.0f, 0.0f}).view({1, 4}), 1e-6, "gradient");
  EXPECT_EQ(cross_entropy_sum(logits, labels, {.label_smoothing = 0.1}).item().toDouble(), INFINITY);
  EXPECT_TRUE(std::isfinite(cross_entropy_sum(logits, labels, {.z_loss = 1e-4}).item().toDouble()));
}

TEST(LinearCrossEntropy, WhereNoLabelCountsThereIsNothing) {
  const at::Tensor labels = at::full({11}, kIgnoredLabel, at::kLong);
  const auto e = evaluate([&](const auto& in) { return linear_cross_entropy(in[0], in[1], labels, {.chunk_tokens = 4, .loss = {0.1, 0.1}}); },
                          {random({11, 6}), random({17, 6}, at::kFloat, 2)}, at::ones({}));
  for (const auto& tensor : {e.result, e.gradients[0], e.gradients[1]}) EXPECT_EQ(tensor.abs().max().item().toDouble(), 0);
}

TEST(LinearCrossEntropy, DefaultChunkKeepsTheLogitsUnderTheirBudget) {
  EXPECT_EQ(linear_cross_entropy_chunk(2048, 32000, at::kFloat), 128);
  EXPECT_EQ(linear_cross_entropy_chunk(2048, 32000, at::kBFloat16), 256);
  EXPECT_EQ(linear_cross_entropy_chunk(525, 32000, at::kFloat), 105);
  EXPECT_EQ(linear_cross_entropy_chunk(0, 7, at::kFloat), 1);
  EXPECT_EQ(linear_cross_entropy_chunk(2048, 256, at::kFloat), 2048);
  EXPECT_EQ(linear_cross_entropy_chunk(2048, 1 << 20, at::kFloat), 128);
  EXPECT_EQ(linear_cross_entropy_chunk(3, 7, at::kFloat), 3);
  EXPECT_EQ(linear_cross_entropy_chunk(2048, 32000, at::kFloat, 100), 100);
  EXPECT_EQ(linear_cross_entropy_chunk(1024, 32000, at::kFloat, 0, kLogitsBytesInPlace), 512);
}

TEST(LinearCrossEntropy, WeightGradientGoesWhereItIsAskedFor) {
  const at::Tensor hidden = random({75, 24}).requires_grad_(), labels = labels_of(75, 300, 4);
  for (const at::ScalarType compute : {at::kFloat, at::kBFloat16}) {
    for (const int64_t chunk : {32, 75}) {
      const at::Tensor weight = random({300, 24}, at::kFloat, 2).requires_grad_(), place = at::full({300, 24}, NAN);
      const LinearCrossEntropyOptions plain{.chunk_tokens = chunk, .compute_dtype = compute};
      auto in_place = plain;
      in_place.weight_gradient = [place] { return GradientPlace{place}; };
      const at::Tensor expected = torch::autograd::grad({linear_cross_entropy(hidden, weight, labels, plain)}, {weight})[0];
      linear_cross_entropy(hidden, weight, labels, in_place).backward();
      EXPECT_TRUE(at::equal(place, expected));
      EXPECT_EQ(weight.grad().const_data_ptr(), place.const_data_ptr()) << "autograd copied it";
      weight.mutable_grad().reset();
      linear_cross_entropy(hidden, weight, labels, in_place).mul(2).backward();  // not what expected_gradient said
      EXPECT_TRUE(at::equal(place, expected * 2));
    }
  }
  const at::Tensor weight = random({300, 24}).requires_grad_();
  const auto refusal = [&](const at::Tensor& place) {
    return message_of<ConfigError>([&] { linear_cross_entropy(hidden, weight, labels, {.weight_gradient = [place] { return GradientPlace{place}; }}); });
  };
  EXPECT_THAT(refusal(at::empty({300, 23})), ::testing::HasSubstr("weight_gradient must be contiguous fp32 [300, 24]"));
  EXPECT_THAT(refusal(at::empty({300, 24}, at::kBFloat16)), ::testing::HasSubstr("weight_gradient"));
  EXPECT_THAT(refusal(at::empty({24, 300}).t()), ::testing::HasSubstr("weight_gradient"));
}

/// One chunk's product is added by the product itself; what is scaled afterwards would scale the others' gradients, too.
TEST(LinearCrossEntropy, WeightGradientIsAddedToWhatIsThere) {
  const at::Tensor hidden = random({75, 24}), labels = labels_of(75, 300, 4), before = random({300, 24}, at::kFloat, 3);
  for (const at::ScalarType compute : {at::kFloat, at::kBFloat16}) {
    for (const bool in_backward : {false, true}) {
      for (const int64_t chunk : {32, 75}) {
        const at::Tensor weight = random({300, 24}, at::kFloat, 2).requires_grad_(), sum = before.clone();
        LinearCrossEntropyOptions options{.chunk_tokens = chunk, .compute_dtype = compute, .expected_gradient = 0.5, .in_backward = in_backward};
        const at::Tensor alone = torch::autograd::grad({linear_cross_entropy(hidden, weight, labels, options).mul(0.5)}, {weight})[0];
        options.weight_gradient = [sum] { return GradientPlace{.memory = sum, .holds_sum = true}; };
        linear_cross_entropy(hidden, weight, labels, options).mul(0.5).backward();
        expect_close(sum, before + alone, 1e-6, "the sum");
        EXPECT_EQ(weight.grad().const_data_ptr(), sum.const_data_ptr()) << "autograd copied it";
        weight.mutable_grad().reset();
        EXPECT_THAT(message_of<Error>([&] { linear_cross_entropy(hidden, weight, labels, options).backward(); }),
                    ::testing::HasSubstr("another gradient than expected_gradient = 0.5"));
      }
    }
  }
}

TEST(LinearCrossEntropy, GradientsOfTheBackwardPassHaveTheSameBits) {
  const at::Tensor labels = labels_of(75, 300, 4);
  for (const at::ScalarType compute : {at::kFloat, at::kBFloat16, at::kHalf}) {
    for (const bool weighs : {true, false}) {
      LinearCrossEntropyOptions options{
          .chunk_tokens = 32, .compute_dtype = compute, .expected_gradient = 0.5, .loss = {.label_smoothing = 0.1, .z_loss = 1e-3}};
      const auto run = [&](bool in_backward, double gradient) {
        const at::Tensor hidden = random({75, 24}).requires_grad_(), weight = random({300, 24}, at::kFloat, 2).requires_grad_(weighs);
        options.in_backward = in_backward;
        const at::Tensor loss = linear_cross_entropy(hidden, weight, labels, options);
        loss.mul(gradient).backward();
        return std::vector<at::Tensor>{loss.detach(), hidden.grad(), weighs ? weight.grad() : at::zeros({1})};
      };
      for (const double gradient : {0.5, 2.0}) {  // as expected, and not
        const auto forward = run(false, gradient), backward = run(true, gradient);
        for (size_t i = 0; i < forward.size(); ++i) EXPECT_TRUE(at::equal(forward[i], backward[i])) << c10::toString(compute) << " " << i;
      }
    }
  }
  // The place is asked for when the gradient is computed, and not before.
  const at::Tensor hidden = random({75, 24}).requires_grad_(), weight = random({300, 24}).requires_grad_(), place = at::full({300, 24}, NAN);
  int asked = 0;
  const auto ask = [&] {
    ++asked;
    return GradientPlace{place};
  };
  const at::Tensor loss = linear_cross_entropy(hidden, weight, labels, {.weight_gradient = ask, .in_backward = true});
  EXPECT_EQ(asked, 0);
  loss.backward();
  EXPECT_EQ(asked, 1);
  EXPECT_EQ(weight.grad().const_data_ptr(), place.const_data_ptr());
}

TEST(LinearCrossEntropy, RefusesLabelsThatAreInNoVocabulary) {
  if (asserts_on_device()) GTEST_SKIP() << "CUDA's kernels assert it";
  const at::Tensor hidden = random({3, 4}), weight = random({5, 4}), labels = at::tensor({0, 5, 1}, at::kLong);
  EXPECT_THAT(message_of<std::exception>([&] { linear_cross_entropy(hidden, weight, labels); }),
              ::testing::HasSubstr(of_kernel("entry 1 is 5; it must be in [0, 5)")));
  EXPECT_THAT(message_of<std::exception>([&] { cross_entropy_sum(random({3, 5}), at::tensor({0, -1, 1}, at::kLong)); }),
              ::testing::HasSubstr(of_kernel("entry 1 is -1")));
}

TEST(LinearCrossEntropy, Refusals) {
  const at::Tensor hidden = random({3, 4}), weight = random({5, 4}), labels = at::tensor({0, 4, 1}, at::kLong);
  EXPECT_THAT(message_of<ConfigError>([&] { linear_cross_entropy(hidden, random({5, 3}), labels); }), ::testing::HasSubstr("[vocabulary, features]"));
  EXPECT_THAT(message_of<ConfigError>([&] { linear_cross_entropy(hidden, weight, labels, {.chunk_tokens = -1}); }), ::testing::HasSubstr("chunk_tokens = -1"));
  const auto loss_refusal = [&](const CrossEntropyOptions& loss) {
    return message_of<ConfigError>([&] { linear_cross_entropy(hidden, weight, labels, {.loss = loss}); });
  };
  EXPECT_THAT(loss_refusal({.label_smoothing = 1.5}), ::testing::HasSubstr("label_smoothing = 1.5: it is a share of the target and must be from 0 to 1"));
  EXPECT_THAT(loss_refusal({.label_smoothing = NAN}), ::testing::HasSubstr("label_smoothing = nan"));
  EXPECT_THAT(loss_refusal({.z_loss = -1}), ::testing::HasSubstr("z_loss = -1: it is a weight and must be 0 or more"));
  EXPECT_THAT(loss_refusal({.z_loss = INFINITY}), ::testing::HasSubstr("z_loss = inf"));
  EXPECT_THAT(message_of<ConfigError>([&] { linear_cross_entropy(hidden, weight, labels, {.compute_dtype = at::kDouble}); }),
              ::testing::HasSubstr("compute_dtype Double is not supported; use Float or BFloat16"));
}

}  // namespace
}  // namespace tessera::kernels
