#include "tessera/recompute/budget.h"

#include <random>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/container/modulelist.h>

#include "tessera/core/error.h"
#include "tessera/nn/attach.h"
#include "tessera/nn/layers.h"
#include "tessera/nn/meta.h"
#include "tessera/recompute/recompute.h"

namespace tessera {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

std::vector<RecomputeCost> costs_of(const std::vector<std::pair<int64_t, double>>& inner) {
  std::vector<RecomputeCost> costs;
  for (const auto& [bytes, flops] : inner)
    costs.push_back({.path = "m" + std::to_string(costs.size()), .input_bytes = 1, .inner_bytes = bytes, .flops = flops});
  return costs;
}

TEST(ChooseRecompute, NothingWhereEverythingFits) {
  const auto choice = choose_recompute(costs_of({{10, 1}, {20, 1}}), 32);
  EXPECT_THAT(choice.recomputed, IsEmpty());
  EXPECT_EQ(choice.kept_bytes, 32);
  EXPECT_EQ(choice.flops, 0);
  EXPECT_THAT(choose_recompute({}, 0).recomputed, IsEmpty());
}

TEST(ChooseRecompute, TheCheapestSetNotTheBestRatioFirst) {
  // To free 10: the best ratio is module 0 (6 for 3), which then needs another; modules 1 and 2 together cost less.
  EXPECT_THAT(choose_recompute(costs_of({{6, 3}, {5, 2.6}, {5, 2.6}, {20, 9}}), 36 + 4 - 10).recomputed, ElementsAre(1, 2));
}

TEST(ChooseRecompute, MeetsTheBudgetAtLeastCostAsTryingAllSetsDoes) {
  std::mt19937 draw(3);
  for (int trial = 0; trial < 200; ++trial) {
    std::vector<std::pair<int64_t, double>> inner;
    const int n = 1 + static_cast<int>(draw() % 8);
    int64_t all = n;
    for (int i = 0; i < n; ++i) {
      inner.emplace_back(draw() % 50, 1 + draw() % 20);
      all += inner.back().first;
    }
    const auto costs = costs_of(inner);
    const int64_t budget = n + static_cast<int64_t>(draw() % static_cast<uint64_t>(all));
    double least = 1e30;
    for (int set = 0; set < 1 << n; ++set) {
      int64_t kept = all;
      double flops = 0;
      for (int i = 0; i < n; ++i) {
        if (!(set >> i & 1)) continue;
        kept -= inner[i].first;
        flops += inner[i].second;
      }
      if (kept <= budget) least = std::min(least, flops);
    }
    const auto choice = choose_recompute(costs, budget);
    EXPECT_LE(choice.kept_bytes, budget);
    EXPECT_DOUBLE_EQ(choice.flops, least);
  }
}

TEST(ChooseRecompute, LargeNumbersAreRoundedToTheSafeSide) {
  std::vector<RecomputeCost> costs;
  for (int i = 0; i < 126; ++i)
    costs.push_back({.path = "", .input_bytes = (int64_t{1} << 28) + i, .inner_bytes = (int64_t{7} << 30) + 12345 * i, .flops = 1e15});
  const int64_t budget = int64_t{200} << 30;
  const auto choice = choose_recompute(costs, budget);
  EXPECT_LE(choice.kept_bytes, budget);
  EXPECT_GT(choice.kept_bytes, budget - (int64_t{9} << 30)) << "no more blocks than needed, but for one";
  // Exactly all of them.
  int64_t inputs = 0;
  for (const auto& cost : costs) inputs += cost.input_bytes;
  EXPECT_EQ(choose_recompute(costs, inputs).recomputed.size(), 126);
}

TEST(ChooseRecompute, RefusesABudgetBelowTheInputs) {
  try {
    choose_recompute(costs_of({{10, 1}, {20, 1}}), 1);
    FAIL();
  } catch (const ConfigError& e) {
    EXPECT_THAT(e.what(), HasSubstr("recompute.budget_bytes = 1"));
    EXPECT_THAT(e.what(), HasSubstr("2 bytes"));
  }
}

struct TowerImpl : nn::Module {
  TowerImpl() {
    torch::nn::ModuleList list;
    for (const int64_t width : {4, 64, 16}) {
      layers.push_back(nn::Sequential(nn::Linear(4, width), [](const at::Tensor& x) { return at::tanh(x); }, nn::Linear(width, 4)));
      list->push_back(layers.back().ptr());
    }
    register_module("layers", list);
    nn::assign_paths(*this);
  }
  at::Tensor forward(const at::Tensor& x) {
    at::Tensor h = x;
    for (auto& layer : layers) h = layer(h);
    return h;
  }
  std::vector<nn::Sequential> layers;
};
TESSERA_MODULE(Tower);

TEST(MeasureRecompute, CountsBytesSavedAndFlopsOnceEachAlsoOnMeta) {
  for (const bool meta : {false, true}) {
    Tower tower = meta ? on_meta([] { return Tower(); }) : Tower();
    const at::Tensor x = at::zeros({10, 4}, meta ? at::kMeta : at::kCPU);
    const auto costs = measure_recompute(*tower, "layers.*", [&] { tower(x).sum(); });
    ASSERT_EQ(costs.size(), 3);
    EXPECT_EQ(costs[1].path, "layers.1");
    for (size_t i = 0; i < 3; ++i) {
      const int64_t width = std::vector<int64_t>{4, 64, 16}[i];
      EXPECT_EQ(costs[i].input_bytes, 10 * 4 * 4);
      EXPECT_EQ(costs[i].inner_bytes, 10 * width * 4) << "tanh's result, kept by tanh and by the product behind it";
      EXPECT_EQ(costs[i].flops, 2 * (2 * 10 * 4 * width) + 10 * width);
    }
  }
}

/// What is kept of it beside the input, for the second pass.
TEST(MeasureRecompute, CountsWhatABufferHeldThatForwardWrites) {
  struct CountingImpl : nn::Module {
    explicit CountingImpl(at::Device device) {
      seen = register_buffer("seen", at::zeros({5}, device));
      scale = register_buffer("scale", at::ones({4}, device));
    }
    at::Tensor forward(const at::Tensor& x) {
      const at::NoGradGuard no_grad;
      seen.add_(1);
      const at::AutoGradMode on(true);
      return (x * scale).exp();
    }
    at::Tensor seen, scale;
  };
  for (const at::Device device : {at::kCPU, at::kMeta}) {
    const auto counting = std::make_shared<CountingImpl>(device);
    const auto costs = measure_recompute(*counting, "", [&] { nn::call(*counting, at::zeros({10, 4}, device).requires_grad_()); });
    ASSERT_EQ(costs.size(), 1);
    EXPECT_EQ(costs[0].input_bytes, 10 * 4 * 4 + 5 * 4);
  }
}

TEST(MeasureRecompute, RefusesModulesInsideOneAnother) {
  Tower tower;
  EXPECT_THROW(measure_recompute(*tower, "**", [&] { tower(at::zeros({1, 4})); }), ConfigError);
  EXPECT_THROW(measure_recompute(*tower, "layer.*", [] {}), ConfigError);
}

TEST(Budget, AttachesToTheModulesItChooses) {
  Tower tower;
  const at::Tensor x = at::ones({10, 4});
  const auto example = [&] { tower(x).sum(); };
  const auto grads = [&] {
    tower->zero_grad();
    tower(x).pow(2).sum().backward();
    return tower->layers[1]->parameters()[0].grad().clone();
  };
  const at::Tensor plain = grads();
  // Inputs 3 x 160; inner 160 + 2560 + 640. Down to 1500: the widest alone.
  const auto again = recompute(tower, {.budget_bytes = 1500, .example = example});
  EXPECT_FALSE(tower->layers[0]->intercepted());
  EXPECT_TRUE(tower->layers[1]->intercepted());
  EXPECT_FALSE(tower->layers[2]->intercepted());
  EXPECT_TRUE(at::equal(grads(), plain));
}

}  // namespace
}  // namespace tessera
