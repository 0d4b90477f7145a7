#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "tessera/kernels/linear_cross_entropy.h"

namespace tessera::kernels {
namespace {

/// The other parts, played by one who knows all logits.
class Oracle : public VocabularyParts {
 public:
  Oracle(int64_t first, at::Tensor logits, at::Tensor labels)
      : VocabularyParts(first, logits.size(1)), logits_(std::move(logits)), labels_(std::move(labels)) {}

  void meet(const at::Tensor& most, const at::Tensor& sum, const at::Tensor& target) override {
    const int64_t rows = most.size(0);
    const at::Tensor logits = logits_.narrow(0, row_, rows), labels = labels_.narrow(0, row_, rows);
    row_ += rows;
    const at::Tensor largest = logits.amax(1);
    // What this part says of itself must be true of it.
    EXPECT_TRUE((most <= largest + 1e-5).all().item<bool>());
    most.copy_(largest);
    sum.copy_((logits - largest.unsqueeze(1)).exp().sum(1));
    target.copy_(logits.gather(1, labels.clamp_min(0).unsqueeze(1)).squeeze(1));
  }

 private:
  at::Tensor logits_, labels_;
  int64_t row_ = 0;
};

struct Result {
  at::Tensor loss, hidden, weight;
};

Result run(const at::Tensor& hidden, const at::Tensor& weight, const at::Tensor& labels, LinearCrossEntropyOptions options) {
  const at::Tensor h = hidden.clone().requires_grad_(), w = weight.clone().requires_grad_();
  const at::Tensor loss = linear_cross_entropy(h, w, labels, options);
  loss.backward(at::full({}, options.expected_gradient));
  return {loss.detach(), h.grad(), w.grad()};
}

TEST(VocabularyParts, AddUpToTheWholeVocabulary) {
  const int64_t tokens = 37, dim = 16, vocabulary = 103;
  at::manual_seed(3);
  const at::Tensor hidden = at::randn({tokens, dim}), weight = at::randn({vocabulary, dim});
  at::Tensor labels = at::randint(vocabulary, {tokens}, at::kLong);
  labels[5] = kIgnoredLabel;
  for (const auto compute : {at::kFloat, at::kBFloat16}) {
    const double bound = compute == at::kFloat ? 1e-5 : 2e-2;
    const at::Tensor logits = hidden.to(compute).mm(weight.to(compute).t()).to(at::kFloat);
    for (const int64_t chunk : {0, 1, 10}) {
      const LinearCrossEntropyOptions options{.chunk_tokens = chunk, .compute_dtype = compute, .expected_gradient = 0.25};
      const Result whole = run(hidden, weight, labels, options);
      at::Tensor d_hidden = at::zeros_like(hidden);
      std::vector<at::Tensor> d_weight;
      for (const auto& [first, size] : std::vector<std::pair<int64_t, int64_t>>{{0, 50}, {50, 52}, {102, 1}}) {
        auto part = options;
        part.parts = c10::make_intrusive<Oracle>(first, logits, labels);
        const Result mine = run(hidden, weight.narrow(0, first, size), labels, part);
        EXPECT_NEAR(mine.loss.item<double>(), whole.loss.item<double>(), bound * whole.loss.item<double>());
        d_hidden += mine.hidden;
        d_weight.push_back(mine.weight);
      }
      EXPECT_LT((d_hidden - whole.hidden).abs().max().item<double>(), bound * whole.hidden.abs().max().item<double>());
      EXPECT_LT((at::cat(d_weight) - whole.weight).abs().max().item<double>(), bound * whole.weight.abs().max().item<double>());
      EXPECT_EQ(d_hidden[5].abs().max().item<double>(), 0);
    }
  }
}

TEST(VocabularyParts, LabelsAreThoseOfTheWhole) {
  const at::Tensor hidden = at::ones({2, 4}), weight = at::ones({3, 4});
  const auto parts = [&](int64_t total) { return c10::make_intrusive<Oracle>(0, at::full({2, total}, 4.0), at::tensor({5, 1}, at::kLong)); };
  EXPECT_NO_THROW(linear_cross_entropy(hidden, weight, at::tensor({5, 1}, at::kLong), {.parts = parts(6)}));
  EXPECT_ANY_THROW(linear_cross_entropy(hidden, weight, at::tensor({5, 1}, at::kLong), {.parts = parts(5)}));
}

}  // namespace
}  // namespace tessera::kernels
