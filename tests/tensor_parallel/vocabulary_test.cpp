#include <memory>

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "support.h"
#include "tessera/comm/testing.h"
#include "tessera/comm/world.h"

/// The head whose vocabulary is cut, against libtorch's own cross-entropy of whole logits.
namespace tessera {
namespace {

using comm::run_ranks;
using comm::World;
using kernels::CrossEntropyOptions;
using namespace testing_support;

constexpr int64_t kDim = 10, kVocabulary = 29;

struct Net : torch::nn::Module {
  Net() : head(kDim, kVocabulary) {
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
  const at::Tensor logits = at::matmul(h.to(dtype), w.to(dtype).t()).to(at::kFloat).flatten(0, 1), label = labels.flatten();
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
  const at::Tensor hidden = at::randn({2, 7, kDim}, generator), weight = at::randn({kVocabulary, kDim}, generator);
  for (const auto dtype : {at::kFloat, at::kBFloat16}) {
    const double bound = dtype == at::kFloat ? 1e-5 : 2e-2;
    for (const CrossEntropyOptions& options : {CrossEntropyOptions{}, {.label_smoothing = 0.1}, {.z_loss = 0.01}, {.label_smoothing = 0.3, .z_loss = 1e-3}}) {
      for (const Sample& batch : {some, none}) {
        const Expected want = expected_of(hidden, weight, batch.labels, options, dtype);
        run_ranks(GetParam(), [&](World& world) {
          const auto net = std::make_shared<Net>();
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

TEST(VocabularyHeads, EvaluationIsThePlainCrossEntropy) {
  const Sample batch = sample(2, 7, kVocabulary);
  run_ranks(2, [&](World& world) {
    const auto net = std::make_shared<Net>();
    const at::Tensor hidden = at::ones({2, 7, kDim});
    const auto tensor = parallelize_module(*net, world.group(), {{"head", VocabParallelHead{}}});
    const at::NoGradGuard no_grad;
    const double plain = net->head->loss_sum(hidden, batch.labels).item<double>();
    net->head->set_loss({.label_smoothing = 0.5, .z_loss = 0.1});
    EXPECT_NE(net->head->loss_sum(hidden, batch.labels).item<double>(), plain);
    net->eval();
    EXPECT_EQ(net->head->loss_sum(hidden, batch.labels).item<double>(), plain);
    EXPECT_THROW(net->head->set_loss({.label_smoothing = -1}), ConfigError);
  });
}

}  // namespace
}  // namespace tessera
