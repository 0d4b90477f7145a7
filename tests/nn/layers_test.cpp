#include "tessera/nn/layers.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>

#include "tessera/core/error.h"
#include "tessera/kernels/layer_norm.h"
#include "tessera/memory/memory.h"
#include "tessera/nn/attach.h"
#include "tessera/nn/gradient_dispatcher.h"
#include "tessera/nn/sample_scope.h"
#include "tests/refusal.h"
#include "tests/test_device.h"

namespace tessera::nn {
namespace {

using ::testing::HasSubstr;

void expect_close(const at::Tensor& actual, const at::Tensor& expected, double tolerance = 1e-5) {
  ASSERT_EQ(actual.sizes(), expected.sizes());
  const double scale = expected.numel() ? expected.abs().max().item<double>() : 0;
  const double difference = expected.numel() ? (actual.to(at::kDouble) - expected.to(at::kDouble)).abs().max().item<double>() : 0;
  EXPECT_LE(difference, tolerance * std::max(scale, 1.0));  // at least 1: a gradient that is zero in theory is rounding in practice
}

/// Gradients of `f` at fp32 inputs against those of the same composition in double.
void expect_gradients(const std::function<at::Tensor(const std::vector<at::Tensor>&)>& ours,
                      const std::function<at::Tensor(const std::vector<at::Tensor>&)>& plain, const std::vector<at::Tensor>& inputs, double tolerance = 2e-6) {
  std::vector<at::Tensor> single, twice;
  for (const auto& input : inputs) {
    single.push_back(input.detach().clone().requires_grad_(input.is_floating_point()));
    twice.push_back(input.is_floating_point() ? input.detach().to(at::kDouble).requires_grad_() : input);
  }
  const at::Tensor a = ours(single), b = plain(twice);
  expect_close(a, b, tolerance);
  const at::Tensor weights = at::randn(a.sizes());
  (a * weights).sum().backward();
  (b * weights.to(at::kDouble)).sum().backward();
  for (size_t i = 0; i < inputs.size(); ++i) {
    if (inputs[i].is_floating_point()) expect_close(single[i].grad(), twice[i].grad(), tolerance);
  }
}

TEST(Layers, LayerNormOfDoublesIsInDouble) {
  const at::Tensor x = at::randn({6, 7}, at::kDouble);
  LayerNorm ours(LayerNormOptions({7}));
  torch::nn::LayerNorm theirs(torch::nn::LayerNormOptions({7}));
  ours->to(at::kDouble);
  theirs->to(at::kDouble);
  expect_close(ours(x), theirs(x), 1e-15);
}

TEST(Layers, LinearIsTorchs) {
  for (const bool bias : {true, false}) {
    Linear ours(LinearOptions(7, 5).bias(bias));
    torch::nn::Linear theirs(torch::nn::LinearOptions(7, 5).bias(bias));
    EXPECT_EQ(ours->named_parameters().keys(), theirs->named_parameters().keys());
    theirs->weight.set_data(ours->weight.data());
    if (bias) theirs->bias.set_data(ours->bias.data());
    for (const std::vector<int64_t>& shape : {std::vector<int64_t>{7}, {1, 7}, {0, 7}, {2, 3, 7}}) {
      const at::Tensor x = at::randn(shape);
      EXPECT_TRUE(at::equal(ours(x), theirs(x)));
    }
  }
}

TEST(Layers, LinearComputesInItsComputeDtypeAndKeepsFp32Gradients) {
  Linear linear(16, 8);
  linear->set_compute_dtype(at::kBFloat16);
  const at::Tensor x = at::randn({4, 16}).requires_grad_();
  const at::Tensor y = linear(x);
  EXPECT_EQ(y.scalar_type(), at::kBFloat16);
  y.sum().backward();
  EXPECT_EQ(linear->weight.grad().scalar_type(), at::kFloat);
  EXPECT_EQ(linear->bias.grad().scalar_type(), at::kFloat);
  EXPECT_EQ(x.grad().scalar_type(), at::kFloat);
  expect_close(y, at::linear(x, linear->weight, linear->bias), 2e-2);
}

TEST(Layers, EmbeddingAndLayerNormAreTorchs) {
  Embedding ours(EmbeddingOptions(9, 4).padding_idx(2));
  torch::nn::Embedding theirs(torch::nn::EmbeddingOptions(9, 4).padding_idx(2));
  theirs->weight.set_data(ours->weight.data());
  const at::Tensor ids = at::randint(9, {3, 5});
  EXPECT_TRUE(at::equal(ours(ids), theirs(ids)));
  ours(ids).sum().backward();
  theirs(ids).sum().backward();
  EXPECT_TRUE(at::equal(ours->weight.grad(), theirs->weight.grad()));
  const at::Tensor place = at::full({9, 4}, NAN);
  GradientDispatcher::of(ours->weight).offer_place(place);
  ours->weight.mutable_grad().reset();
  ours(ids).sum().backward();
  EXPECT_TRUE(at::equal(place, theirs->weight.grad()));
  EXPECT_EQ(ours->weight.grad().const_data_ptr(), place.const_data_ptr()) << "autograd copied it";
  EXPECT_THROW(Embedding(EmbeddingOptions(9, 4).sparse(true)), ConfigError);
  EXPECT_THROW(Embedding(EmbeddingOptions(9, 4).padding_idx(9)), ConfigError);

  for (const bool affine : {true, false}) {
    const auto options = LayerNormOptions({5, 4}).eps(1e-3).elementwise_affine(affine);
    LayerNorm norm(options);
    torch::nn::LayerNorm reference(options);
    const at::Tensor x = at::randn({3, 5, 4});
    EXPECT_TRUE(at::equal(norm(x), reference(x)));
    norm->set_compute_dtype(at::kBFloat16);
    EXPECT_EQ(norm(x).scalar_type(), at::kBFloat16);
  }
}

/// Of a stream of 16 bits: arithmetic as of the fp32 one, and nothing twice its size is kept.
TEST(Layers, LayerNormOfNarrowInputsKeepsThemAsTheyAre) {
  for (const auto narrow : {at::kBFloat16, at::kHalf}) {
    LayerNorm norm(LayerNormOptions({64}));
    {
      const at::NoGradGuard no_grad;
      norm->weight.normal_();
      norm->bias.normal_();
    }
    const at::Tensor x = at::randn({2, 8, 64}).to(narrow).requires_grad_(), wide = x.detach().to(at::kFloat).requires_grad_();
    const at::Tensor d = at::randn({2, 8, 64}).to(narrow);
    MemoryTracker tracker;
    const TrackMemory tracking(tracker);
    const at::Tensor y = norm(x);
    EXPECT_EQ(y.scalar_type(), narrow);
    EXPECT_EQ(tracker.current(), y.nbytes() + 2 * 2 * 8 * 4) << "the result, and two fp32 numbers a row";
    y.backward(d);
    const at::Tensor d_weight = norm->weight.grad().clone(), d_bias = norm->bias.grad().clone();
    norm->zero_grad();
    const bool fused = narrow == at::kBFloat16;
    const at::Tensor expected = fused ? kernels::layer_norm(wide, norm->weight, norm->bias, 1e-5) : norm(wide);
    EXPECT_TRUE(at::equal(y, expected.to(narrow)));
    expected.backward(d.to(at::kFloat));
    EXPECT_TRUE(at::equal(x.grad(), wide.grad().to(narrow)));
    EXPECT_TRUE(at::equal(d_weight, norm->weight.grad()));
    EXPECT_TRUE(at::equal(d_bias, norm->bias.grad()));
  }
  LayerNorm plain(LayerNormOptions({8}).elementwise_affine(false));
  const at::Tensor x = at::randn({3, 8}).to(at::kBFloat16).requires_grad_();
  plain(x).sum().backward();
  EXPECT_EQ(x.grad().scalar_type(), at::kBFloat16);
}

TEST(Layers, RmsNormAgainstDouble) {
  RMSNorm norm(33, 1e-5);
  expect_gradients(
      [&](const auto& in) {
        norm->weight = in[1];
        return norm(in[0]);
      },
      [](const auto& in) { return in[0] * (in[0].pow(2).mean(-1, true) + 1e-5).rsqrt() * in[1]; }, {at::randn({2, 7, 33}), at::randn({33})});
}

TEST(Layers, AttentionCoreAgainstDouble) {
  for (const auto& [heads, kv_heads, length] : {std::tuple{4, 4, 7}, {6, 2, 5}, {3, 1, 1}, {4, 2, 33}}) {
    const int64_t features = 8;
    AttentionCore core;
    expect_gradients([&](const auto& in) { return core(in[0], in[1], in[2]); },
                     [&](const auto& in) {
                       const auto expand = [&](const at::Tensor& x) { return x.repeat_interleave(heads / kv_heads, 2).transpose(1, 2); };
                       const at::Tensor mask = at::ones({length, length}, at::kBool).tril();
                       at::Tensor scores = at::matmul(in[0].transpose(1, 2), expand(in[1]).transpose(-2, -1)) / std::sqrt(double(features));
                       scores = scores.masked_fill(mask.logical_not(), -std::numeric_limits<double>::infinity());
                       return at::matmul(at::softmax(scores, -1), expand(in[2])).transpose(1, 2);
                     },
                     {at::randn({2, length, heads, features}), at::randn({2, length, kv_heads, features}), at::randn({2, length, kv_heads, features})}, 5e-6);
  }
}

TEST(Layers, AttentionWithMasksAgainstDoubleKeepsItsWeightsAlone) {
  const at::Tensor documents = at::tensor({0, 0, 0, 1, 1, 2, 2, 2}).expand({2, 8});
  AttentionCore core;
  expect_gradients([&](const auto& in) { return core(in[0], in[1], in[2], std::nullopt, documents); },
                   [&](const auto& in) {
                     const auto expand = [&](const at::Tensor& x) { return x.repeat_interleave(2, 2).transpose(1, 2); };
                     const at::Tensor seen = documents.unsqueeze(2).eq(documents.unsqueeze(1)).unsqueeze(1).logical_and(at::ones({8, 8}, at::kBool).tril());
                     const at::Tensor scores = at::matmul(in[0].transpose(1, 2), expand(in[1]).transpose(-2, -1)) / std::sqrt(8.0);
                     const at::Tensor weights = at::softmax(scores.masked_fill(seen.logical_not(), -std::numeric_limits<double>::infinity()), -1);
                     return at::matmul(weights, expand(in[2])).transpose(1, 2);
                   },
                   {at::randn({2, 8, 4, 8}), at::randn({2, 8, 2, 8}), at::randn({2, 8, 2, 8})}, 5e-6);

  const auto made = [](int64_t heads) { return at::randn({1, 32, heads, 4}).to(at::kBFloat16).requires_grad_(); };
  const at::Tensor q = made(2), k = made(2), v = made(2);
  MemoryTracker tracker;
  const TrackMemory tracking(tracker);
  const at::Tensor out = core(q, k, v, std::nullopt, at::zeros({1, 32}, at::kLong));
  const int64_t weights = 2 * 2 * 32 * 32;  // of 16 bits
  EXPECT_LE(tracker.current(), weights + 5 * q.nbytes()) << "neither their fp32 form nor the mask";
}

TEST(Layers, AttentionWithMasksEqualsAttentionWithout) {
  AttentionCore core;
  const at::Tensor q = at::randn({2, 6, 4, 8}), k = at::randn({2, 6, 2, 8}), v = at::randn({2, 6, 2, 8});
  const at::Tensor plain = core(q, k, v);
  expect_close(core(q, k, v, at::arange(6)), plain);
  expect_close(core(q, k, v, std::nullopt, at::zeros({2, 6}, at::kLong)), plain);
  // Columns in another order, with their positions: the same rows in that order.
  const at::Tensor order = at::tensor({3, 0, 5, 1, 4, 2});
  const auto reorder = [&](const at::Tensor& x) { return x.index_select(1, order); };
  expect_close(core(reorder(q), reorder(k), reorder(v), order), reorder(plain));
  // Two documents side by side: each as if alone.
  const at::Tensor documents = at::tensor({0, 0, 1, 1, 1, 1}).expand({2, 6});
  const at::Tensor both = core(q, k, v, std::nullopt, documents);
  const auto part = [](const at::Tensor& x, int64_t from, int64_t size) { return x.narrow(1, from, size); };
  expect_close(part(both, 0, 2), core(part(q, 0, 2), part(k, 0, 2), part(v, 0, 2)));
  expect_close(part(both, 2, 4), core(part(q, 2, 4), part(k, 2, 4), part(v, 2, 4)));
  // The last queries of a longer row of keys.
  for (const int64_t last : {1, 3}) expect_close(core(part(q, 6 - last, last), k, v), part(plain, 6 - last, last));
  EXPECT_THROW(core(q, part(k, 0, 3), part(v, 0, 3)), ConfigError);
}

TEST(Layers, RotaryTablesFollowPositions) {
  RotaryEmbedding rotary(8, 16, 10000.0);
  const auto [cos, sin] = rotary(5, std::nullopt, testing_support::test_device());
  EXPECT_EQ(cos.sizes(), (std::vector<int64_t>{5, 4}));
  for (int64_t position = 0; position < 5; ++position) {
    for (int64_t i = 0; i < 4; ++i) {
      const double angle = position * std::pow(10000.0, -2.0 * i / 8);
      EXPECT_NEAR(cos[position][i].item<double>(), std::cos(angle), 1e-6);
      EXPECT_NEAR(sin[position][i].item<double>(), std::sin(angle), 1e-6);
    }
  }
  const auto [late_cos, late_sin] = rotary(2, at::tensor({4, 1}), testing_support::test_device());
  EXPECT_TRUE(at::equal(late_cos, cos.index_select(0, at::tensor({4, 1}))));
  EXPECT_TRUE(rotary->buffers().empty());
  EXPECT_THROW(rotary(17, std::nullopt, testing_support::test_device()), ConfigError);
  EXPECT_THROW(RotaryEmbedding(7, 16, 10000.0), ConfigError);
}

TEST(Layers, RotaryTablesMadeInInferenceModeServeTraining) {
  RotaryEmbedding rotary(4, 4, 10000.0);
  {
    const c10::InferenceMode evaluate;
    rotary(4, std::nullopt, testing_support::test_device());
  }
  const at::Tensor x = at::ones({4, 2}).requires_grad_();
  (x * rotary(4, std::nullopt, testing_support::test_device()).first).sum().backward();
  EXPECT_TRUE(x.grad().defined());
}

TEST(DropoutTest, MaskIsAFunctionOfTheGlobalPlace) {
  Dropout dropout(0.3);
  dropout->set_path("layers.1.ffn_dropout");
  const int64_t batch = 4, length = 6, features = 10;
  const at::Tensor x = at::ones({batch, length, features});
  const auto run = [&](const SampleContext& context, const at::Tensor& input) {
    const SampleScope scope(context);
    return dropout(input);
  };
  const SampleContext whole{.seed = 5, .step = 2, .seq_len = length};
  const at::Tensor expected = run(whole, x);
  EXPECT_TRUE(at::equal(expected, run(whole, x)));
  const double share = expected.eq(0).to(at::kFloat).mean().item<double>();
  EXPECT_NEAR(share, 0.3, 0.12);
  for (const int64_t micro : {1, 3, 4}) {
    for (int64_t first = 0; first + micro <= batch; first += micro) {
      SampleContext context = whole;
      context.first_sample = first;
      EXPECT_TRUE(at::equal(run(context, x.narrow(0, first, micro)), expected.narrow(0, first, micro)));
    }
  }
  SampleContext right_half = whole;
  right_half.first_column = 4;
  EXPECT_TRUE(at::equal(run(right_half, x.narrow(1, 4, 2)), expected.narrow(1, 4, 2)));
  SampleContext scattered = whole;  // as context parallelism deals them, and of these a part, as sequence parallelism cuts it
  scattered.positions = at::tensor({5, 0, 3}, at::kLong);
  EXPECT_TRUE(at::equal(run(scattered, x.index_select(1, scattered.positions)), expected.index_select(1, scattered.positions)));
  scattered.first_column = 1;
  EXPECT_TRUE(at::equal(run(scattered, x.index_select(1, scattered.positions).narrow(1, 1, 2)), expected.index_select(1, at::tensor({0, 3}, at::kLong))));
  EXPECT_FALSE(scattered == whole);
  SampleContext some = whole;
  some.first_feature = 3;
  some.features = features;
  EXPECT_TRUE(at::equal(run(some, x.narrow(2, 3, 5)), expected.narrow(2, 3, 5)));
  EXPECT_FALSE(some == whole);
  SampleContext other = whole;
  other.step = 3;
  EXPECT_FALSE(at::equal(run(other, x), expected));
  other = whole;
  other.seed = 6;
  EXPECT_FALSE(at::equal(run(other, x), expected));
  dropout->set_path("layers.0.ffn_dropout");
  EXPECT_FALSE(at::equal(run(whole, x), expected));
  dropout->eval();
  EXPECT_TRUE(at::equal(run(whole, x), x));
}

/// Columns of [B, H, S, S] or [B, S, H, D] are not those of a sequence, and nothing tells which of the two it is.
TEST(DropoutTest, HeadsHaveNoPlaceInASequence) {
  Dropout dropout(0.5);
  const at::Tensor x = at::ones({2, 4, 4, 8});
  std::vector<SampleContext> placed(4, {.seed = 5, .step = 2});
  placed[0].seq_len = 4;
  placed[1].positions = at::arange(4, 8);
  placed[2].first_column = 4;
  placed[3].columns = 4;
  for (const SampleContext& context : placed) {
    const SampleScope scope(context);
    EXPECT_THAT(testing_support::refusal([&] { dropout(x); }), ::testing::HasSubstr("has no one dimension of columns"));
  }
  EXPECT_NO_THROW(dropout(x));
  const SampleScope scope({.seed = 5, .step = 2});
  const at::Tensor y = dropout(x);
  EXPECT_FALSE(at::equal(y[0], y[1]));
}

TEST(DropoutTest, BackwardDropsTheSameElements) {
  Dropout dropout(0.5);
  const at::Tensor x = at::ones({2, 3, 8}).requires_grad_();
  at::Tensor y;
  {
    const SampleScope scope({.seed = 1, .step = 1});
    y = dropout(x);
  }
  y.sum().backward();  // outside the scope: what backward needs was kept
  EXPECT_TRUE(at::equal(x.grad(), y.detach()));
  EXPECT_THROW(Dropout(1.0), ConfigError);
  EXPECT_THROW(dropout(at::ones({3})), ConfigError);
  EXPECT_EQ(dropout(at::ones({0, 3, 8})).numel(), 0);
}

TEST(DropoutTest, WithoutAStepDrawsFromLibtorchsGenerator) {
  Dropout drop(0.5), other(0.5);
  const at::Tensor x = at::ones({8, 64});
  torch::manual_seed(3);
  const at::Tensor first = drop(x), second = drop(x), others = other(x);
  EXPECT_FALSE(at::equal(first, second));
  EXPECT_FALSE(at::equal(second, others));
  EXPECT_FALSE(at::equal(first, others));
  {
    const SampleScope somewhere({.first_column = 4});  // a part of a sequence, of a step that nobody stated
    EXPECT_FALSE(at::equal(drop(x), drop(x)));
  }
  torch::manual_seed(3);
  EXPECT_TRUE(at::equal(drop(x), first));
  EXPECT_TRUE(at::equal(drop(x), second));
  drop->eval();
  EXPECT_TRUE(at::equal(drop(x), x));
}

TEST(SampleScopeTest, NestsAndEnds) {
  EXPECT_EQ(SampleScope::current().step, 0);
  const SampleScope outer({.step = 1});
  {
    const SampleScope inner({.step = 2, .first_sample = 3, .first_column = 1, .seq_len = 5});
    EXPECT_EQ(SampleScope::current().step, 2);
    EXPECT_TRUE(at::equal(SampleScope::token_rows(2, 2, testing_support::test_device()), at::tensor({16, 17, 21, 22})));
    EXPECT_TRUE(SampleScope::token_rows(2, 2, testing_support::test_device()).is_same(SampleScope::token_rows(2, 2, testing_support::test_device())));
    EXPECT_TRUE(at::equal(SampleScope::token_rows(1, 4, testing_support::test_device()), at::tensor({16, 17, 18, 19})));
  }
  EXPECT_EQ(SampleScope::current().step, 1);
}

TEST(Head, LossIsTheSumOfTheCrossEntropiesOfItsLogits) {
  LanguageModelHead head(16, 37);
  const at::Tensor hidden = at::randn({2, 5, 16});
  at::Tensor labels = at::randint(37, {2, 5});
  labels[1][2] = -100;
  expect_gradients(
      [&](const auto& in) {
        head->weight = in[1];
        return head->loss_sum(in[0], labels);
      },
      [&](const auto& in) { return at::cross_entropy_loss(at::linear(in[0], in[1]).flatten(0, 1), labels.flatten(), {}, at::Reduction::Sum, -100); },
      {hidden, at::randn({37, 16})});
  EXPECT_EQ(head->logits(hidden).sizes(), (std::vector<int64_t>{2, 5, 37}));
  EXPECT_THROW(head->loss_sum(hidden, labels.narrow(1, 0, 4)), ConfigError);
}

TEST(Head, BothUsesPassTheChainAndCountAsOutputs) {
  struct Count : Interceptor {
    Values call(Module&, Values inputs, const Next& next) override {
      ++calls;
      return next(std::move(inputs));
    }
    int calls = 0;
  };
  LanguageModelHead head(8, 11);
  auto count = std::make_shared<Count>();
  const auto attached = attach(*head, count);
  MemoryTracker tracker;
  TrackMemory track(tracker);
  const at::Tensor hidden = at::randn({1, 3, 8});
  const at::Tensor logits = head->logits(hidden);
  EXPECT_EQ(tracker.current(MemoryCategory::Outputs), 4 * 3 * 11);
  head->loss_sum(hidden, at::randint(11, {1, 3}));
  EXPECT_EQ(count->calls, 2);
  EXPECT_THROW(LanguageModelHead(head->weight * 2), ConfigError);
}

}  // namespace
}  // namespace tessera::nn
