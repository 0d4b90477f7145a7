#include "tessera/nn/contrastive_loss.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tessera/comm/collectives.h"
#include "tessera/comm/testing.h"
#include "tessera/core/error.h"
#include "tessera/core/rng.h"
#include "tessera/layout/slice.h"
#include "tests/test_device.h"

namespace tessera::nn {
namespace {

at::Tensor features(at::IntArrayRef sizes, const std::string& stream) {
  return testing_support::floats_by(sizes, [&](float* out, int64_t n) { CounterRng(8, stream).fill_normal(out, 0, n, 0, 1); });
}

/// Both ways, written down from the definition.
at::Tensor whole_loss(const at::Tensor& a, const at::Tensor& b, const at::Tensor& scale) {
  const auto unit = [](const at::Tensor& x) { return x / x.square().sum(1, true).sqrt(); };
  const at::Tensor logits = at::matmul(unit(a), unit(b).t()) * scale;
  const auto sum = [](const at::Tensor& scores) { return -at::log_softmax(scores, 1).diagonal().sum(); };
  return (sum(logits) + sum(logits.t())) / (2.0 * static_cast<double>(a.size(0)));
}

TEST(ContrastiveLoss, EqualsTheWholeBatchOnOneDevice) {
  for (const auto& [world, pairs] : std::vector<std::pair<int, int64_t>>{{1, 6}, {2, 6}, {3, 7}, {5, 7}, {8, 9}, {3, 2}}) {
    const auto leaf = [](const at::Tensor& tensor) { return tensor.clone().requires_grad_(true); };
    const at::Tensor a = leaf(features({pairs, 5}, "a")), b = leaf(features({pairs, 5}, "b")), scale = leaf(at::full({}, 4.0));
    const at::Tensor loss = whole_loss(a, b, scale);
    loss.backward();
    comm::run_ranks(world, [&](comm::World& ranks) {
      const auto [begin, size] = chunk(pairs, ranks.size(), ranks.rank());
      const at::Tensor own_a = leaf(a.detach().narrow(0, begin, size)), own_b = leaf(b.detach().narrow(0, begin, size)), own_scale = leaf(scale.detach());
      const at::Tensor part = contrastive_loss_sum(ranks.group(), own_a, own_b, own_scale, world == 3 ? -1 : pairs) / static_cast<double>(pairs);
      part.backward();
      at::Tensor sum = part.detach().clone(), scale_grad = own_scale.grad().clone();
      comm::all_reduce(ranks.group(), sum);
      comm::all_reduce(ranks.group(), scale_grad);
      EXPECT_NEAR(sum.item<double>(), loss.item<double>(), 1e-6 * loss.item<double>());
      EXPECT_TRUE(at::allclose(own_a.grad(), a.grad().narrow(0, begin, size), 1e-4, 1e-7));
      EXPECT_TRUE(at::allclose(own_b.grad(), b.grad().narrow(0, begin, size), 1e-4, 1e-7));
      EXPECT_TRUE(at::allclose(scale_grad, scale.grad(), 1e-4, 1e-7));
    });
  }
}

TEST(ContrastiveLoss, DoublesAreComputedInTheirType) {
  const at::Tensor a = features({6, 5}, "a").to(at::kDouble) / 3, b = features({6, 5}, "b").to(at::kDouble) / 3, scale = at::full({}, 4.0, a.options());
  const at::Tensor loss = contrastive_loss_sum(comm::Group::self(), a, b, scale);
  EXPECT_EQ(loss.scalar_type(), at::kDouble);
  EXPECT_NEAR(loss.item<double>() / 6, whole_loss(a, b, scale).item<double>(), 1e-13);
}

TEST(ContrastiveLoss, SmallerBatchesAreAnotherLoss) {
  const at::Tensor a = features({6, 5}, "a"), b = features({6, 5}, "b"), scale = at::full({}, 4.0);
  const auto group = comm::Group::self();
  const auto part = [&](int64_t begin) { return contrastive_loss_sum(group, a.narrow(0, begin, 3), b.narrow(0, begin, 3), scale).item<double>(); };
  EXPECT_GT(contrastive_loss_sum(group, a, b, scale).item<double>(), (part(0) + part(3)) * 1.05) << "accumulation is not a big batch";
}

TEST(ContrastiveLoss, RefusesWhatDoesNotFit) {
  const auto refuses = [](const at::Tensor& a, const at::Tensor& b, int64_t total, const std::string& text) {
    EXPECT_THAT([&] { contrastive_loss_sum(comm::Group::self(), a, b, at::ones({}), total); },
                ::testing::ThrowsMessage<ConfigError>(::testing::HasSubstr(text)));
  };
  refuses(at::ones({2, 3}), at::ones({3, 3}), -1, "must be [pairs, features] of one shape");
  refuses(at::ones({2, 3}), at::ones({2, 3}), 3, "holds 2 of 3 pairs, and is dealt 3");
}

}  // namespace
}  // namespace tessera::nn
