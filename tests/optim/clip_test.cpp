#include "tessera/optim/clip.h"

#include <optional>

#include <ATen/Parallel.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tessera/comm/collectives.h"
#include "tessera/comm/testing.h"
#include "tessera/core/error.h"
#include "tessera/memory/memory.h"
#include "tessera/memory/on_host.h"
#include "tests/optim/parameters.h"

namespace tessera::optim {
namespace {

const std::vector<std::vector<int64_t>> kClipShapes{{13, 7}, {1}, {}, {29}, {2, 3, 4}, {0, 4}, {300, 257}};

double reference_norm(const std::vector<nn::NamedParameter>& parameters) {
  double sum = 0;
  for (const auto& parameter : parameters) {
    if (parameter.tensor.grad().defined()) sum += parameter.tensor.grad().to(at::kDouble).square().sum().item<double>();
  }
  return std::sqrt(sum);
}

/// The rank's rows of every parameter, dealt by layout's rule, with their gradients; scalars belong to rank 0 alone.
std::vector<nn::NamedParameter> shard(const std::vector<nn::NamedParameter>& parameters, int ranks, int rank) {
  std::vector<nn::NamedParameter> shards;
  for (const auto& [name, whole, aliases] : parameters) {
    const auto shape = whole.sizes().vec();
    if (shape.empty() && rank != 0) continue;
    const auto [begin, size] = shape.empty() ? std::pair<int64_t, int64_t>{0, 1} : chunk(shape[0], ranks, rank);
    const auto rows = [&, begin = begin, size = size](const at::Tensor& tensor) {
      return (shape.empty() ? tensor : tensor.narrow(0, begin, size)).detach().clone();
    };
    auto part = rows(whole).set_requires_grad(true);
    part.mutable_grad() = rows(whole.grad());
    nn::set_slice(part, shape.empty() ? Slice::whole(name, shape) : Slice::along(name, shape, 0, begin, size));
    shards.push_back({name, part, {}});
  }
  return shards;
}

TEST(GlobalNorm, IsThe2NormOfAllGradients) {
  const auto parameters = make_parameters(kClipShapes);
  draw_gradients(parameters, 1);
  parameters[3].tensor.mutable_grad().reset();
  const auto norm = global_norm(parameters);
  EXPECT_EQ(norm.scalar_type(), at::kDouble);
  EXPECT_EQ(norm.dim(), 0);
  EXPECT_NEAR(norm.item<double>(), reference_norm(parameters), 1e-12 * reference_norm(parameters));
}

TEST(GlobalNorm, AddsUpTheBoxesOfARow) {
  auto part = at::ones({15}).set_requires_grad(true);
  part.mutable_grad() = at::ones({15});
  nn::set_slice(part, elements(Slice::whole("p", {2, 5, 4}), 2, 15));
  for (const auto order : {NormOrder::Fast, NormOrder::FixedTree})
    EXPECT_DOUBLE_EQ(global_norm({NormGroup{{{"p", part, {}}}, {}}}, order).item<double>(), std::sqrt(15));
}

TEST(GlobalNorm, OfNothingIsZero) {
  EXPECT_EQ(global_norm(std::vector<nn::NamedParameter>{}).item<double>(), 0);
  EXPECT_EQ(global_norm(make_parameters(kClipShapes)).item<double>(), 0);
}

TEST(GlobalNorm, KeepsItsAccuracyWhereFp32WouldNot) {
  const auto parameters = make_parameters({{4096, 1024}, {1}});
  at::Tensor(parameters[0].tensor).mutable_grad() = at::full({4096, 1024}, 1e-4f);
  at::Tensor(parameters[1].tensor).mutable_grad() = at::full({1}, 1e20f);
  EXPECT_NEAR(global_norm(parameters).item<double>() / 1e20, 1, 1e-7);
  at::Tensor(parameters[1].tensor).mutable_grad() = at::zeros({1});
  EXPECT_NEAR(global_norm(parameters).item<double>() / (double(1e-4f) * 2048), 1, 1e-12);
}

TEST(GlobalNorm, ReadsGradientsInLowerPrecision) {
  auto parameter = at::ones({3, 5}, at::kBFloat16).set_requires_grad(true);
  parameter.mutable_grad() = at::full({3, 5}, 2, at::kBFloat16);
  EXPECT_NEAR(global_norm({nn::NamedParameter{"p", parameter, {}}}).item<double>(), 2 * std::sqrt(15.0), 1e-12);
}

/// A device makes them in pieces of 33,554,432 elements: several rows, or parts of one.
TEST(GlobalNorm, OfMoreThanAPieceIsTheWhole) {
  for (const std::vector<int64_t>& shape : {std::vector<int64_t>{1, 34'000'000}, {3, 11'300'000}}) {
    auto parameter = at::empty(shape, at::kBFloat16).set_requires_grad(true);
    parameter.mutable_grad() = at::ones(shape, at::kBFloat16);
    parameter.mutable_grad().view(-1).narrow(0, parameter.numel() - 1, 1).fill_(3);
    MemoryTracker tracker;
    const TrackMemory track(tracker);
    EXPECT_NEAR(global_norm({nn::NamedParameter{"p", parameter, {}}}).item<double>(), std::sqrt(static_cast<double>(parameter.numel() + 8)), 1e-9);
    EXPECT_LE(tracker.peak(), 270'000'000);
  }
}

TEST(GlobalNorm, DoesNotDependOnTheNumberOfThreads) {
  const auto parameters = make_parameters(kClipShapes);
  draw_gradients(parameters, 2);
  const int threads = at::get_num_threads();
  at::set_num_threads(1);
  const double one = global_norm(parameters).item<double>();
  at::set_num_threads(2);
  const double two = global_norm(parameters).item<double>();
  at::set_num_threads(threads);
  EXPECT_EQ(one, two);
}

TEST(GlobalNorm, MeetsOverRanksThatHoldSlices) {
  const auto whole = make_parameters(kClipShapes);
  draw_gradients(whole, 3);
  const double fixed = global_norm({NormGroup{whole, {}}}, NormOrder::FixedTree).item<double>();
  EXPECT_NEAR(fixed, reference_norm(whole), 1e-12 * fixed);
  for (const int ranks : {1, 2, 3, 5, 8}) {
    comm::run_ranks(ranks, [&](comm::World& world) {
      const auto group = world.group();
      auto parts = shard(whole, ranks, world.rank());
      const auto reduce = [&](at::Tensor& sums) { comm::all_reduce(group, sums); };
      EXPECT_NEAR(global_norm({NormGroup{parts, reduce}}).item<double>(), fixed, 1e-12 * fixed) << ranks;
      // Every rank lists every parameter for the fixed tree; who holds nothing of one holds an empty slice.
      if (parts.size() != whole.size()) {
        auto nothing = at::empty({0}).set_requires_grad(true);
        nothing.mutable_grad() = at::empty({0});
        nn::set_slice(nothing, Slice{"p2", {}, {}});
        parts.insert(parts.begin() + 2, {"p2", nothing, {}});
      }
      EXPECT_EQ(global_norm({NormGroup{parts, reduce}}, NormOrder::FixedTree).item<double>(), fixed) << ranks << " ranks must give the very bits of one";
    });
  }
}

TEST(GlobalNorm, CountsReplicatedSlicesOnce) {
  const auto whole = make_parameters({{6, 5}, {9}});
  draw_gradients(whole, 4);
  comm::run_ranks(3, [&](comm::World& world) {
    const auto group = world.group();
    const auto sharded = shard({whole[0]}, 3, world.rank());
    const NormGroup over_ranks{sharded, [&](at::Tensor& sums) { comm::all_reduce(group, sums); }};
    // Slices live on the tensor, and ranks are threads here: each rank needs its own replica.
    const NormGroup replicated{shard({whole[1]}, 1, 0), {}};
    EXPECT_NEAR(global_norm({over_ranks, replicated}).item<double>(), reference_norm(whole), 1e-10);
  });
}

TEST(GlobalNorm, SumsColumnsAndSeveralBoxes) {
  const auto whole = make_parameters({{8, 6}});
  draw_gradients(whole, 5);
  const double expected = global_norm(whole).item<double>();
  const auto part = [&](std::vector<Box> boxes) {
    Slice slice{"p0", {8, 6}, std::move(boxes)};
    auto tensor = at::zeros(slice.local_shape()).set_requires_grad(true);
    tensor.mutable_grad() = take(whole[0].tensor.grad(), slice).clone();
    nn::set_slice(tensor, slice);
    return nn::NamedParameter{"p0", tensor, {}};
  };
  const auto columns = part({{{0, 0}, {8, 1}}, {{0, 5}, {8, 1}}}), middle = part({{{0, 1}, {8, 4}}});
  const auto zigzag = part({{{0, 0}, {2, 6}}, {{6, 0}, {2, 6}}}), inner = part({{{2, 0}, {4, 6}}});
  const auto corners = part({{{0, 0}, {3, 2}}, {{3, 2}, {5, 4}}}), rest = part({{{0, 2}, {3, 4}}, {{3, 0}, {5, 2}}});
  for (const auto& [first, second] : {std::pair(columns, middle), std::pair(zigzag, inner), std::pair(corners, rest)}) {
    for (const auto order : {NormOrder::Fast, NormOrder::FixedTree}) {
      const double a = global_norm({NormGroup{{first}, {}}}, order).item<double>(), b = global_norm({NormGroup{{second}, {}}}, order).item<double>();
      EXPECT_NEAR(std::hypot(a, b), expected, 1e-12);
    }
  }
}

TEST(GlobalNorm, RefusesAGradientThatDoesNotFitItsSlice) {
  const auto parameters = make_parameters({{4, 3}});
  draw_gradients(parameters, 1);
  nn::set_slice(parameters[0].tensor, Slice::along("p0", {9, 3}, 0, 0, 5));
  EXPECT_THAT([&] { global_norm(parameters); }, testing::ThrowsMessage<InternalError>(testing::HasSubstr("p0")));
}

TEST(ClipGradients, ScalesDownToTheNormAndNeverUp) {
  const auto parameters = make_parameters(kClipShapes);
  draw_gradients(parameters, 6);
  const double norm = reference_norm(parameters);
  const auto before = parameters[0].tensor.grad().clone();
  clip_gradients(parameters, global_norm(parameters), 2 * norm);
  EXPECT_TRUE(at::equal(parameters[0].tensor.grad(), before)) << "a factor of one changes no bit";
  clip_gradients(parameters, global_norm(parameters), 1.5);
  EXPECT_NEAR(reference_norm(parameters), 1.5, 1e-5);
  EXPECT_TRUE(at::allclose(parameters[0].tensor.grad(), before * (1.5 / (norm + 1e-6))));
}

TEST(ClipGradients, ScalesFp64ByAFactorOfFp64) {
  const nn::NamedParameter parameter{"x", at::zeros({3}, at::kDouble), {}};
  const auto before = at::tensor({3.0, -2.0, 7.0}, at::kDouble);
  at::Tensor(parameter.tensor).mutable_grad() = before.clone();
  const at::Tensor norm = global_norm({parameter});
  clip_gradients({parameter}, norm, 0.3);
  EXPECT_TRUE(at::allclose(parameter.tensor.grad(), before * (0.3 / (norm.item<double>() + 1e-6)), /*rtol=*/1e-15, /*atol=*/0));
}

TEST(ClipGradients, PassesOnWhatIsNotFinite) {
  const auto parameters = make_parameters({{3}});
  at::Tensor(parameters[0].tensor).mutable_grad() = at::full({3}, std::numeric_limits<float>::quiet_NaN());
  clip_gradients(parameters, global_norm(parameters), 1.0);
  EXPECT_TRUE(parameters[0].tensor.grad().isnan().all().item<bool>());
}

TEST(ClipGradients, TakesTheSameMemoryOnMeta) {
  for (const auto order : {NormOrder::Fast, NormOrder::FixedTree}) {
    const auto measure = [&](at::Device device) {
      const auto parameters = make_parameters(kClipShapes, device);
      draw_gradients(parameters, 1);
      MemoryTracker tracker;
      const TrackMemory track(tracker);
      const auto norm = global_norm({NormGroup{parameters, {}}}, order);
      clip_gradients(parameters, norm, 1.0);
      return std::tuple(tracker.peak(), tracker.current(), tracker.num_allocations());
    };
    const auto real = measure(testing_support::test_device());
    std::optional<MetaAsAccelerator> device;
    if (!testing_support::test_device().is_cpu()) device.emplace();
    EXPECT_EQ(real, measure(at::kMeta));
  }
}

}  // namespace
}  // namespace tessera::optim
