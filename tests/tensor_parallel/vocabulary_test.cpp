#include <memory>

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include "support.h"
#include "tessera/comm/backends/record.h"
#include "tessera/comm/collectives.h"
#include "tessera/comm/testing.h"
#include "tessera/comm/world.h"
#include "tessera/kernels/choice.h"
#include "tessera/kernels/linear_cross_entropy.h"
#include "tests/refusal.h"

/// The head whose vocabulary is cut, against libtorch's own cross-entropy of whole logits.
namespace tessera {
namespace {

using comm::run_ranks;
using comm::World;
using kernels::CrossEntropyOptions;
using namespace testing_support;

constexpr int64_t kHidden = 10, kVocabulary = 29;

struct VocabularyNet : torch::nn::Module {
  explicit VocabularyNet(int64_t vocabulary = kVocabulary) : head(kHidden, vocabulary) {
    register_module("head", head);
    nn::assign_paths(*this);
  }
  nn::LanguageModelHead head;
};

struct Expected {
  double loss;
  at::Tensor d_hidden, d_weight;
};

Expected expected_of(const at::Tensor& hidden, const at::Tensor& weight, const at::Tensor& labels, const CrossEntropyOptions& options, at::ScalarType dtype) {
  const at::Tensor h = hidden.clone().requires_grad_(), w = weight.clone().requires_grad_();
  const at::Tensor logits = at::matmul(h.to(dtype), w.to(dtype).t()).to(dtype == at::kDouble ? dtype : at::kFloat).flatten(0, 1), label = labels.flatten();
  const at::Tensor z = at::logsumexp(logits, 1).square().masked_fill(label < 0, 0).sum();
  const at::Tensor loss = at::cross_entropy_loss(logits, label, {}, at::Reduction::Sum, -100, options.label_smoothing) + options.z_loss * z;
  loss.backward();
  return {loss.item<double>(), h.grad(), w.grad()};
}

double largest(const at::Tensor& tensor) { return tensor.abs().max().item<double>(); }

class VocabularyHead : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(TensorParallel, VocabularyHead, ::testing::Values(1, 2, 3, 5, 8));

TEST_P(VocabularyHead, SmoothsAndBoundsLogitsAsOneDeviceDoes) {
  const Sample some = sample(2, 7, kVocabulary), none{some.tokens, at::full_like(some.labels, -100)};
  auto generator = at::make_generator<at::CPUGeneratorImpl>(9);
  const at::Tensor hidden = at::randn({2, 7, kHidden}, generator), weight = at::randn({kVocabulary, kHidden}, generator);
  for (const auto dtype : {at::kFloat, at::kBFloat16}) {
    const double bound = dtype == at::kFloat ? 1e-5 : 2e-2;
    for (const CrossEntropyOptions& options : {CrossEntropyOptions{}, {.label_smoothing = 0.1}, {.z_loss = 0.01}, {.label_smoothing = 0.3, .z_loss = 1e-3}}) {
      for (const Sample& batch : {some, none}) {
        const Expected want = expected_of(hidden, weight, batch.labels, options, dtype);
        run_ranks(GetParam(), [&](World& world) {
          const auto net = std::make_shared<VocabularyNet>();
          net->head->weight.data().copy_(weight);
          const auto tensor = parallelize_module(*net, world.group(), {{"head", VocabParallelHead{}}});
          net->head->set_compute_dtype(dtype);
          net->head->set_loss(options);
          const at::Tensor h = hidden.clone().requires_grad_();
          const at::Tensor loss = net->head->loss_sum(h, batch.labels);
          loss.backward();
          EXPECT_NEAR(loss.item<double>(), want.loss, bound * want.loss);
          EXPECT_LE(largest(h.grad() - want.d_hidden), bound * largest(want.d_hidden));
          EXPECT_LE(largest(net->head->weight.grad() - take(want.d_weight, nn::slice_of(net->head->weight))), bound * largest(want.d_weight));
        });
      }
    }
  }
}

// 2049 and 2048 columns: 2,048 tokens of the former take two chunks of the default size, of the latter one.
TEST(VocabularyHeads, UnevenPartsMeetEquallyOften) {
  constexpr int64_t tokens = 2048, vocabulary = 4097;
  ASSERT_NE(kernels::linear_cross_entropy_chunk(tokens, 2049, at::kFloat), kernels::linear_cross_entropy_chunk(tokens, 2048, at::kFloat));
  const Sample batch = sample(2, tokens / 2, vocabulary);
  auto generator = at::make_generator<at::CPUGeneratorImpl>(9);
  const at::Tensor hidden = at::randn({2, tokens / 2, kHidden}, generator), weight = at::randn({vocabulary, kHidden}, generator);
  const Expected want = expected_of(hidden, weight, batch.labels, {}, at::kFloat);
  std::vector<std::vector<CollectiveEvent>> calls(2);
  run_ranks(2, [&](World& world) {
    const auto recorder = std::make_shared<comm::Recorder>();
    const comm::GroupInfo info{.name = "tp", .rank = world.rank(), .size = 2, .timeout = std::chrono::seconds(60)};
    const comm::Group group(info, comm::make_record_engine(recorder, info, world.group().engine()));
    const auto net = std::make_shared<VocabularyNet>(vocabulary);
    net->head->weight.data().copy_(weight);
    const auto tensor = parallelize_module(*net, group, {{"head", VocabParallelHead{}}});
    const at::Tensor h = hidden.clone().requires_grad_();
    const at::Tensor loss = net->head->loss_sum(h, batch.labels);
    loss.backward();
    EXPECT_NEAR(loss.item<double>(), want.loss, 1e-5 * want.loss);
    EXPECT_LE(largest(h.grad() - want.d_hidden), 1e-5 * largest(want.d_hidden));
    calls[static_cast<size_t>(world.rank())] = recorder->records();
  });
  ASSERT_EQ(calls[0].size(), calls[1].size());
  for (size_t i = 0; i < calls[0].size(); ++i) EXPECT_EQ(calls[0][i].shape, calls[1][i].shape) << "collective " << i;
}

/// `run.kernels = "reference"`, which takes fp64, too.
TEST_P(VocabularyHead, PlainOperatorsMeetAsTheFusedOneDoes) {
  const kernels::KernelChoiceGuard plainly(kernels::KernelChoice::Reference);
  const Sample some = sample(2, 7, kVocabulary), none{some.tokens, at::full_like(some.labels, -100)};
  auto generator = at::make_generator<at::CPUGeneratorImpl>(9);
  for (const auto dtype : {at::kFloat, at::kDouble}) {
    const double bound = dtype == at::kFloat ? 1e-5 : 1e-12;
    const at::Tensor hidden = at::randn({2, 7, kHidden}, generator).to(dtype), weight = at::randn({kVocabulary, kHidden}, generator).to(dtype);
    for (const CrossEntropyOptions& options : {CrossEntropyOptions{}, {.label_smoothing = 0.1}, {.z_loss = 0.01}, {.label_smoothing = 0.3, .z_loss = 1e-3}}) {
      for (const Sample& batch : {some, none}) {
        const Expected want = expected_of(hidden, weight, batch.labels, options, dtype);
        run_ranks(GetParam(), [&](World& world) {
          const kernels::KernelChoiceGuard also(kernels::KernelChoice::Reference);
          const auto net = std::make_shared<VocabularyNet>();
          net->to(dtype);
          net->head->weight.data().copy_(weight);
          const auto tensor = parallelize_module(*net, world.group(), {{"head", VocabParallelHead{}}});
          net->head->set_loss(options);
          const at::Tensor h = hidden.clone().requires_grad_();
          const at::Tensor loss = net->head->loss_sum(h, batch.labels);
          (loss * 3).backward();
          EXPECT_NEAR(loss.item<double>(), want.loss, bound * want.loss);
          const at::Tensor own = loss.detach().reshape({1}), all = at::empty({world.size()}, own.options());
          comm::all_gather(world.group(), all, own);
          EXPECT_TRUE(all.eq(all[0]).all().item<bool>()) << "to the last bit: a checkpoint replays the loss on every rank";
          EXPECT_LE(largest(h.grad() - 3 * want.d_hidden), 3 * bound * largest(want.d_hidden));
          EXPECT_LE(largest(net->head->weight.grad() - 3 * take(want.d_weight, nn::slice_of(net->head->weight))), 3 * bound * largest(want.d_weight));
        });
      }
    }
  }
}

/// Each rank would take it for another's, and look up zeros.
TEST(VocabularyHeads, AnIdThatIsInNoVocabularyIsRefused) {
  run_ranks(2, [&](World& world) {
    nn::Embedding embedding(kVocabulary, kHidden);
    const auto tensor = parallelize_module(*embedding, world.group(), {{"", VocabParallelEmbedding{}}}, {.replicas = ReplicaStart::Broadcast});
    for (const int64_t id : {int64_t{-1}, int64_t{kVocabulary}, int64_t{1} << 40}) {
      EXPECT_THAT(refusal([&] { (void)embedding(at::full({1, 3}, id, at::kLong)); }), ::testing::HasSubstr("id " + std::to_string(id) + " is not in"));
    }
    EXPECT_NO_THROW((void)embedding(at::full({1, 3}, kVocabulary - 1, at::kLong)));
    EXPECT_NO_THROW((void)embedding(at::empty({0, 3}, at::kLong)));
  });
}

TEST(VocabularyHeads, EvaluationIsThePlainCrossEntropy) {
  const Sample batch = sample(2, 7, kVocabulary);
  run_ranks(2, [&](World& world) {
    const auto net = std::make_shared<VocabularyNet>();
    const at::Tensor hidden = at::ones({2, 7, kHidden});
    const auto tensor = parallelize_module(*net, world.group(), {{"head", VocabParallelHead{}}}, {.replicas = ReplicaStart::Broadcast});
    const at::NoGradGuard no_grad;
    const double plain = net->head->loss_sum(hidden, batch.labels).item<double>();
    net->head->set_loss({.label_smoothing = 0.5, .z_loss = 0.1});
    EXPECT_NE(net->head->loss_sum(hidden, batch.labels).item<double>(), plain);
    net->eval();
    EXPECT_EQ(net->head->loss_sum(hidden, batch.labels).item<double>(), plain);
    EXPECT_THROW(net->head->set_loss({.label_smoothing = -1}), ConfigError);
  });
}

/// Ranks meet in numbers: what others hold has no derivative.
TEST(VocabularyHeads, ASecondDerivativeOfThePlainLossIsRefused) {
  run_ranks(2, [](World& world) {
    const kernels::KernelChoiceGuard reference(kernels::KernelChoice::Reference);
    const auto net = std::make_shared<VocabularyNet>();
    const auto tensor = parallelize_module(*net, world.group(), {{"head", VocabParallelHead{}}}, {.replicas = ReplicaStart::Broadcast});
    const at::Tensor h = at::ones({2, 3, kHidden}).requires_grad_(), labels = at::ones({2, 3}, at::kLong);
    const at::Tensor slope = torch::autograd::grad({net->head->loss_sum(h, labels)}, {h}, {}, true, /*create_graph=*/true)[0];
    EXPECT_THAT(refusal([&] { slope.square().sum().backward(); }), ::testing::HasSubstr("the loss over a vocabulary that is cut"));
  });
}

}  // namespace
}  // namespace tessera
