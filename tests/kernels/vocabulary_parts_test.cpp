#include <numeric>

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "tessera/kernels/linear_cross_entropy.h"
#include "tessera/kernels/products.h"

namespace tessera::kernels {
namespace {

/// The other parts, played by one who knows all logits, and can tell whether what this part says of its own is true.
class Oracle : public VocabularyParts {
 public:
  Oracle(int64_t first, int64_t size, at::Tensor logits, at::Tensor labels, CrossEntropyOptions loss = {})
      : VocabularyParts(first, logits.size(1)), size_(size), logits_(std::move(logits)), labels_(std::move(labels)), loss_(loss) {}

  void meet(const at::Tensor& most, const at::Tensor& sum, const at::Tensor& target) override {
    const int64_t rows = most.size(0);
    const at::Tensor mine = statistics(rows, first, size_), whole = statistics(rows, 0, total);
    row_ += rows;
    int64_t statistic = 0;
    for (const auto* told : {&most, &sum, &target}) {
      EXPECT_TRUE(at::allclose(*told, mine[statistic], 1e-5, 1e-5)) << "statistic " << statistic;
      told->copy_(whole[statistic++]);
    }
  }

 private:
  /// most, sum and target over some columns of the next rows: [3, rows].
  at::Tensor statistics(int64_t rows, int64_t begin, int64_t columns) const {
    const at::Tensor logits = logits_.narrow(0, row_, rows).narrow(1, begin, columns), labels = labels_.narrow(0, row_, rows) - begin;
    const at::Tensor here = (labels >= 0).logical_and(labels < columns), most = logits.amax(1);
    const at::Tensor at_label = logits.gather(1, labels.masked_fill(here.logical_not(), 0).unsqueeze(1)).squeeze(1) * here;
    const at::Tensor target = (1 - loss_.label_smoothing) * at_label + loss_.label_smoothing / static_cast<double>(total) * logits.sum(1);
    return at::stack({most, (logits - most.unsqueeze(1)).exp().sum(1), target});
  }

  int64_t size_;
  at::Tensor logits_, labels_;
  CrossEntropyOptions loss_;
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

/// Sizes of `parts` uneven parts of `entries`: each has one, and the last most of the rest.
std::vector<int64_t> uneven(int64_t entries, int64_t parts) {
  std::vector<int64_t> sizes;
  for (int64_t part = 0; part + 1 < parts; ++part) sizes.push_back(1 + part * part);
  sizes.push_back(entries - std::accumulate(sizes.begin(), sizes.end(), int64_t{0}));
  return sizes;
}

TEST(VocabularyParts, AddUpToTheWholeVocabulary) {
  const int64_t tokens = 23, dim = 16, vocabulary = 117;
  at::manual_seed(3);
  const at::Tensor hidden = at::randn({tokens, dim}), weight = at::randn({vocabulary, dim});
  at::Tensor labels = at::randint(vocabulary, {tokens}, at::kLong);
  labels[5] = kIgnoredLabel;
  for (const auto compute : {at::kFloat, at::kBFloat16}) {
    const double bound = compute == at::kFloat ? 1e-5 : 2e-2;
    const auto product = is_widened(compute, hidden.device()) ? at::kFloat : compute;  // what a processor without products of 16 bits has of them
    const at::Tensor logits = hidden.to(compute).to(product).mm(weight.to(compute).to(product).t()).to(at::kFloat);
    for (const CrossEntropyOptions& loss : {CrossEntropyOptions{}, CrossEntropyOptions{.label_smoothing = 0.2, .z_loss = 0.01}}) {
      for (const int64_t chunk : {0, 1, 10}) {
        const LinearCrossEntropyOptions options{.chunk_tokens = chunk, .compute_dtype = compute, .expected_gradient = 0.25, .loss = loss};
        const Result whole = run(hidden, weight, labels, options);
        for (const int64_t parts : {1, 2, 3, 5, 8}) {
          at::Tensor d_hidden = at::zeros_like(hidden);
          std::vector<at::Tensor> d_weight;
          int64_t first = 0;
          for (const int64_t size : uneven(vocabulary, parts)) {
            auto part = options;
            part.parts = c10::make_intrusive<Oracle>(first, size, logits, labels, loss);
            const Result mine = run(hidden, weight.narrow(0, first, size), labels, part);
            EXPECT_NEAR(mine.loss.item<double>(), whole.loss.item<double>(), bound * whole.loss.item<double>());
            d_hidden += mine.hidden;
            d_weight.push_back(mine.weight);
            first += size;
          }
          EXPECT_LT((d_hidden - whole.hidden).abs().max().item<double>(), bound * whole.hidden.abs().max().item<double>());
          EXPECT_LT((at::cat(d_weight) - whole.weight).abs().max().item<double>(), bound * whole.weight.abs().max().item<double>());
          EXPECT_EQ(d_hidden[5].abs().max().item<double>(), 0);
        }
      }
    }
  }
}

TEST(VocabularyParts, LabelsAreThoseOfTheWhole) {
  const at::Tensor hidden = at::ones({2, 4}), weight = at::ones({3, 4});
  const auto parts = [&](int64_t total) { return c10::make_intrusive<Oracle>(0, 3, at::full({2, total}, 4.0), at::tensor({5, 1}, at::kLong)); };
  EXPECT_NO_THROW(linear_cross_entropy(hidden, weight, at::tensor({5, 1}, at::kLong), {.parts = parts(6)}));
  EXPECT_ANY_THROW(linear_cross_entropy(hidden, weight, at::tensor({5, 1}, at::kLong), {.parts = parts(5)}));
}

}  // namespace
}  // namespace tessera::kernels
