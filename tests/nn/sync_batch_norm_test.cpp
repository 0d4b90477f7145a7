#include "tessera/nn/sync_batch_norm.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/nn/modules/batchnorm.h>

#include "tessera/comm/collectives.h"
#include "tessera/comm/testing.h"
#include "tessera/core/error.h"
#include "tessera/core/rng.h"
#include "tessera/layout/slice.h"
#include "tessera/nn/meta.h"
#include "tests/test_device.h"

namespace tessera::nn {
namespace {

constexpr int64_t kChannels = 3;
constexpr double kBound = 1e-5;  // of each tensor's largest entry

at::Tensor values(at::IntArrayRef sizes, const std::string& stream, float mean = 0) {
  return testing_support::floats_by(sizes, [&](float* out, int64_t n) { CounterRng(6, stream).fill_normal(out, 0, n, mean, 1); });
}

double difference(const at::Tensor& got, const at::Tensor& want) {
  if (want.numel() == 0) return 0;
  return ((got.cpu() - want.cpu()).abs().max() / want.cpu().abs().max().clamp_min(1e-30)).item<double>();
}

template <class Norm>
void set_affine(Norm& norm) {
  const at::NoGradGuard no_grad;
  norm.weight.copy_(values({kChannels}, "weight"));
  norm.bias.copy_(values({kChannels}, "bias"));
}

/// Two training steps and a pass in eval mode of libtorch's BatchNorm on the whole batch.
struct OneDevice {
  explicit OneDevice(const BatchNormOptions& options, int64_t samples) : norm(options) {
    set_affine(*norm);
    for (int step = 0; step < 2; ++step) {
      x = values({samples, kChannels, 2, 2}, "x" + std::to_string(step), 5).requires_grad_(true);
      norm->zero_grad();
      y = norm(x);
      (y * values(x.sizes(), "dy")).sum().backward();
    }
    weight_grad = norm->weight.grad(), bias_grad = norm->bias.grad();
    norm->eval();
    evaluated = norm(x.detach());
  }
  torch::nn::BatchNorm2d norm;
  at::Tensor x, y, weight_grad, bias_grad, evaluated;
};

void expect_the_whole_batch(const BatchNormOptions& options, int world, int64_t samples) {
  OneDevice one(options, samples);
  comm::run_ranks(world, [&](comm::World& ranks) {
    const auto [begin, size] = chunk(samples, ranks.size(), ranks.rank());
    SyncBatchNorm norm(options);
    set_affine(*norm);
    EXPECT_EQ(synchronize_batch_norms(*norm, ranks.group()), 1);
    at::Tensor x, y;
    for (int step = 0; step < 2; ++step) {
      x = values({samples, kChannels, 2, 2}, "x" + std::to_string(step), 5).narrow(0, begin, size).clone().requires_grad_(true);
      norm->zero_grad();
      y = norm(x);
      (y * values({samples, kChannels, 2, 2}, "dy").narrow(0, begin, size)).sum().backward();
    }
    EXPECT_LE(difference(y, one.y.narrow(0, begin, size)), kBound);
    EXPECT_LE(difference(x.grad(), one.x.grad().narrow(0, begin, size)), kBound);
    at::Tensor weight_grad = norm->weight.grad(), bias_grad = norm->bias.grad();  // data parallelism sums them
    comm::all_reduce(ranks.group(), weight_grad);
    comm::all_reduce(ranks.group(), bias_grad);
    EXPECT_LE(difference(weight_grad, one.weight_grad), kBound);
    EXPECT_LE(difference(bias_grad, one.bias_grad), kBound);
    EXPECT_LE(difference(norm->running_mean, one.norm->running_mean), kBound);
    EXPECT_LE(difference(norm->running_var, one.norm->running_var), kBound);
    EXPECT_EQ(norm->num_batches_tracked.item<int64_t>(), 2);
    norm->eval();
    EXPECT_LE(difference(norm(x.detach()), one.evaluated.narrow(0, begin, size)), kBound);
  });
}

TEST(SyncBatchNorm, EqualsTheWholeBatchOnOneDevice) {
  for (const int world : {1, 2, 3, 5, 8}) expect_the_whole_batch(BatchNormOptions(kChannels), world, 7);  // of 8 ranks, one holds nothing
}

TEST(SyncBatchNorm, KeepsACumulativeAverage) { expect_the_whole_batch(BatchNormOptions(kChannels).momentum(std::nullopt), 3, 5); }

TEST(SyncBatchNorm, WithoutItsStatisticsSharedGradientsDiffer) {
  OneDevice one(BatchNormOptions(kChannels), 6);
  SyncBatchNorm alone(kChannels);
  set_affine(*alone);
  const at::Tensor x = one.x.detach().narrow(0, 0, 3).clone().requires_grad_(true);
  (alone(x) * values({6, kChannels, 2, 2}, "dy").narrow(0, 0, 3)).sum().backward();
  EXPECT_GT(difference(x.grad(), one.x.grad().narrow(0, 0, 3)), 100 * kBound);
}

TEST(SyncBatchNorm, WithoutRunningStatisticsEvaluatesByItsOwnSamplesAsTorchDoes) {
  const auto options = BatchNormOptions(kChannels).track_running_stats(false);
  const at::Tensor all = values({7, kChannels, 2, 2}, "x", 5), dy = values({7, kChannels, 2, 2}, "dy");
  const auto pass = [](auto& norm, const at::Tensor& x, const at::Tensor& slope) {
    const at::Tensor leaf = x.clone().requires_grad_();
    const at::Tensor y = norm(leaf);
    (y * slope).sum().backward();
    return std::pair(y.detach(), leaf.grad());
  };
  const auto on_one_device = [&](const at::Tensor& x, const at::Tensor& slope) {
    torch::nn::BatchNorm2d norm(options);
    set_affine(*norm);
    return pass(norm, x, slope);
  };
  const auto [whole_y, whole_dx] = on_one_device(all, dy);
  for (const int world : {2, 3}) {
    comm::run_ranks(world, [&](comm::World& ranks) {
      const auto [begin, size] = chunk(7, ranks.size(), ranks.rank());
      const auto mine = [&](const char* name, float mean) { return values({7, kChannels, 2, 2}, name, mean).narrow(0, begin, size); };  // on its device
      const at::Tensor x = mine("x", 5), slope = mine("dy", 0);
      SyncBatchNorm norm(options);
      set_affine(*norm);
      norm->synchronize(ranks.group());
      const auto [y, dx] = pass(norm, x, slope);
      EXPECT_LE(difference(y, whole_y.narrow(0, begin, size)), kBound);
      EXPECT_LE(difference(dx, whole_dx.narrow(0, begin, size)), kBound);
      norm->eval();
      if (ranks.rank() == 0) return;  // the others evaluate without it
      const auto [evaluated, evaluated_dx] = pass(norm, x, slope);
      const auto [alone, alone_dx] = on_one_device(x, slope);
      EXPECT_LE(difference(evaluated, alone), kBound);
      EXPECT_LE(difference(evaluated_dx, alone_dx), kBound);
      EXPECT_EQ(norm(values({0, kChannels, 2, 2}, "x")).size(0), 0);
      EXPECT_THAT([&] { norm(values({1, kChannels}, "x")); },
                  ::testing::ThrowsMessage<ConfigError>(::testing::HasSubstr("in eval mode one value per channel on this rank has no variance")));
    });
  }
}

TEST(SyncBatchNorm, IsBuiltOnMetaAndKeepsItsInputsDtype) {
  const auto norm = on_meta([] { return SyncBatchNorm(kChannels).ptr(); });
  materialize(*norm, 1, testing_support::test_device());
  const auto& impl = *std::dynamic_pointer_cast<SyncBatchNormImpl>(norm);
  EXPECT_TRUE(at::equal(impl.running_var, at::ones({kChannels})));
  EXPECT_TRUE(at::equal(impl.weight, at::ones({kChannels})));
  SyncBatchNorm half(kChannels);
  EXPECT_EQ(half(values({4, kChannels}, "x").to(at::kBFloat16)).scalar_type(), at::kBFloat16);
}

TEST(SyncBatchNorm, DoublesAreComputedInTheirType) {
  torch::nn::BatchNorm1d want(kChannels);
  SyncBatchNorm norm(kChannels);
  for (torch::nn::Module* module : std::initializer_list<torch::nn::Module*>{want.ptr().get(), norm.ptr().get()}) module->to(at::kDouble);
  for (const bool trains : {true, false}) {
    want->train(trains);
    norm->train(trains);
    const auto of = [](auto& layer) {
      const at::Tensor x = (values({7, kChannels}, "x", 5).to(at::kDouble) / 3).requires_grad_();
      const at::Tensor y = layer(x);
      (y * values({7, kChannels}, "dy")).sum().backward();
      return std::pair(y.detach(), x.grad());
    };
    const auto [y, dx] = of(norm);
    const auto [want_y, want_dx] = of(want);
    EXPECT_EQ(y.scalar_type(), at::kDouble);
    EXPECT_LE(difference(y, want_y), 1e-13);
    EXPECT_LE(difference(dx, want_dx), 1e-12);
    EXPECT_LE(difference(norm->running_var, want->running_var), 1e-13);
  }
}

TEST(SyncBatchNorm, RefusesOtherChannels) {
  SyncBatchNorm norm(kChannels);
  EXPECT_THAT([&] { norm(at::zeros({2, kChannels + 1})); }, ::testing::ThrowsMessage<ConfigError>(::testing::HasSubstr("must be [samples, 3, ...]")));
}

TEST(SyncBatchNorm, ABatchThatIsEmptyEverywhereSaysNothingAndOneValueIsRefused) {
  comm::run_ranks(2, [&](comm::World& world) {
    SyncBatchNorm norm(kChannels);
    norm->synchronize(world.group());
    norm(values({3, kChannels}, "x"));
    const at::Tensor mean = norm->running_mean.clone(), variance = norm->running_var.clone();
    const at::Tensor none = values({0, kChannels}, "x").requires_grad_();
    norm(none).sum().backward();
    EXPECT_TRUE(at::equal(norm->running_mean, mean));
    EXPECT_TRUE(at::equal(norm->running_var, variance));
    EXPECT_FALSE(at::isnan(norm->weight.grad()).any().item<bool>());
    if (!mean.is_cpu()) return;
    EXPECT_THAT([&] { norm(values({1 - world.rank(), kChannels}, "x")); },
                ::testing::ThrowsMessage<ConfigError>(::testing::HasSubstr("one value per channel on all ranks together has no variance")));
  });
}

TEST(SyncBatchNorm, HasNoSecondDerivativeInTrainingAndSaysSo) {
  SyncBatchNorm norm(kChannels);
  const at::Tensor x = values({4, kChannels}, "x").requires_grad_();
  const auto of_a_penalty = [&] {
    const at::Tensor slope = torch::autograd::grad({norm(x).square().sum()}, {x}, {}, /*retain_graph=*/true, /*create_graph=*/true)[0];
    slope.square().sum().backward();
  };
  EXPECT_THAT(of_a_penalty, ::testing::ThrowsMessage<ConfigError>(::testing::HasSubstr("SyncBatchNorm: its gradient was differentiated once more")));
  norm->eval();
  of_a_penalty();
  EXPECT_TRUE(x.grad().defined());
  norm = SyncBatchNorm(BatchNormOptions(kChannels).track_running_stats(false));
  norm->eval();
  of_a_penalty();
}

}  // namespace
}  // namespace tessera::nn
