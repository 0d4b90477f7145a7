// The weights of micro-batches in flight: what an action of an asynchronous schedule computes with, what is kept and for how long, and the executor against
// lists of versions on one thread.

#include "tessera/pipeline/weight_versions.h"

#include <ATen/autocast_mode.h>
#include <gmock/gmock.h>
#include <torch/torch.h>

#include "tessera/comm/testing.h"
#include "tessera/core/error.h"
#include "tessera/memory/memory.h"
#include "tessera/pipeline/executor.h"
#include "tessera/pipeline/schedules/generators.h"
#include "tessera/pipeline/schedules/simulate.h"
#include "tests/test_device.h"

namespace tessera::pipeline {
namespace {

using schedules::Schedule;
using ::testing::HasSubstr;

constexpr double kRate = 0.3;

void descend(const std::vector<at::Tensor>& weights) {
  const at::NoGradGuard no_grad;
  for (at::Tensor weight : weights) {
    weight.sub_(weight.grad(), kRate);
    weight.mutable_grad() = at::Tensor();
  }
}

/// Of autograd's two ways to save a weight: the product saves a view of the one, the scaling the other itself.
at::Tensor linear_and_scale(const at::Tensor& in, const std::vector<at::Tensor>& weights) { return torch::linear(in, weights[0]) * weights[1]; }

std::vector<at::Tensor> weights_of(int stage, int width) {
  const auto numbers = torch::arange(width * width, torch::kFloat).view({width, width});
  return {torch::sin(numbers * (stage + 1)).mul_(0.5).requires_grad_(), torch::cos(numbers[0] * (stage + 1)).requires_grad_()};
}

TEST(WeightVersions, BackwardSeesTheWeightsOfItsForward) {
  const auto schedule = schedules::pipedream(2, 3);  // rank 0: F0 F1 B0 U0 F2@1 B1 U1 B2@1 U2
  const auto weights = weights_of(0, 3);
  const std::vector<at::Tensor> first{weights[0].detach().clone().requires_grad_(), weights[1].detach().clone().requires_grad_()};
  const at::Tensor in = torch::ones({2, 3}, at::requires_grad()), again = torch::full({2, 3}, 2.0F, at::requires_grad());
  WeightVersions versions(weights, schedule.actions[0], 0);
  at::Tensor a, b;
  versions.with(0, [&] { a = linear_and_scale(in, weights).sum(); });
  versions.with(0, [&] { b = linear_and_scale(again, weights).sum(); });
  versions.with(0, [&] { a.backward(); });
  versions.update([&] { descend(weights); });
  EXPECT_EQ(versions.held(), 2);
  const at::Tensor newest = weights[0].detach().clone();
  EXPECT_FALSE(at::equal(newest, first[0]));
  versions.with(0, [&] { b.backward(); });
  EXPECT_TRUE(at::equal(weights[0], newest));
  const at::Tensor gradient = again.grad().clone();
  again.mutable_grad() = at::Tensor();
  linear_and_scale(again, first).sum().backward();
  EXPECT_TRUE(at::equal(gradient, again.grad()));
  EXPECT_TRUE(at::equal(weights[0].grad(), first[0].grad()));
  EXPECT_TRUE(at::equal(weights[1].grad(), first[1].grad()));
}

TEST(WeightVersions, AutogradStillRefusesWeightsThatWereChangedBehindItsBack) {
  const auto weights = weights_of(0, 3);
  WeightVersions versions(weights, schedules::pipedream(2, 3).actions[0], 0);
  at::Tensor out;
  versions.with(0, [&] { out = linear_and_scale(torch::ones({2, 3}, at::requires_grad()), weights).sum(); });
  {
    const at::NoGradGuard no_grad;
    weights[0].mul_(2);
  }
  EXPECT_THAT([&] { versions.with(0, [&] { out.backward(); }); }, ::testing::ThrowsMessage<c10::Error>(HasSubstr("modified by an inplace operation")));
}

TEST(WeightVersions, AVersionGoesWithItsLastUseAlsoWhereAnActionFails) {
  const auto weights = weights_of(0, 3);
  WeightVersions versions(weights, schedules::pipedream(2, 2).actions[0], 0);  // F0 F1 B0 U0 B1 U1
  const auto nothing = [] {};
  versions.with(0, nothing);
  versions.with(0, nothing);
  versions.with(0, nothing);
  versions.update([&] { weights[0].detach().fill_(7); });
  EXPECT_EQ(versions.held(), 2);
  EXPECT_THROW(versions.with(0, [] { throw Error("as planted"); }), Error);
  EXPECT_EQ(weights[0][0][0].item<float>(), 7);
  versions.with(0, [&] { EXPECT_NE(weights[0][0][0].item<float>(), 7); });
  EXPECT_EQ(versions.held(), 1);
  EXPECT_THROW(versions.with(0, nothing), InternalError);
  const auto* const memory = weights[0].data_ptr();
  versions.update(nothing);  // nobody needs version 1: in place
  EXPECT_EQ(weights[0].data_ptr(), memory);
  EXPECT_EQ(versions.newest(), 2);
}

/// h -> linear and scale, from a leaf of its own numbers to a sum.
class Layer final : public Stage {
 public:
  Layer(int number, int stages, int width) : weights(weights_of(number, width)), number_(number), stages_(stages), width_(width) {}

  StageOutputs forward(int micro_batch, const std::vector<at::Tensor>& inputs) override {
    const at::Tensor out = apply(number_ == 0 ? data(micro_batch, width_) : inputs[0], weights);
    if (number_ + 1 < stages_) return {.values = {out}};
    return {.values = {}, .loss = out.sum()};
  }
  std::optional<TensorSpec> input_spec(int, int) const override { return TensorSpec{{2, width_}, at::kFloat}; }

  static at::Tensor data(int micro_batch, int width) { return torch::cos(torch::arange(2 * width, torch::kFloat).view({2, width}) * (micro_batch + 1)); }
  static at::Tensor apply(const at::Tensor& in, const std::vector<at::Tensor>& weights) { return torch::tanh(linear_and_scale(in, weights)); }

  std::vector<at::Tensor> weights;

 private:
  int number_, stages_, width_;
};

/// Which version a micro-batch computes with, and whether its gradient is the last that an update sums, as the papers say it.
struct Rule {
  const char* name;
  Schedule schedule;
  std::function<int(int stage, int micro_batch)> version;
  std::function<bool(int micro_batch)> updates;
};

std::vector<Rule> rules(int p, int m) {
  const int group = std::min(p, m);
  return {{"pipedream", schedules::pipedream(p, m), [p](int s, int b) { return std::max(0, b - (p - 1 - s)); }, [](int) { return true; }},
          {"vertical sync", schedules::pipedream(p, m, true), [p](int, int b) { return std::max(0, b - (p - 1)); }, [](int) { return true; }},
          {"2BW", schedules::pipedream_2bw(p, m), [group](int, int b) { return std::max(0, b / group - 1); },
           [group, m](int b) { return (b + 1) % group == 0 || b + 1 == m; }}};
}

/// One micro-batch after the other through all stages, each with its versions in a list.
std::vector<std::vector<at::Tensor>> by_lists(const Rule& rule, int p, int m, int width) {
  std::vector<std::vector<std::vector<at::Tensor>>> versions;  // of each stage
  std::vector<std::vector<at::Tensor>> sums(static_cast<size_t>(p));
  for (int s = 0; s < p; ++s) versions.push_back({weights_of(s, width)});
  for (int b = 0; b < m; ++b) {
    at::Tensor h = Layer::data(b, width);
    std::vector<std::vector<at::Tensor>> used;
    for (int s = 0; s < p; ++s) {
      auto& leaves = used.emplace_back();
      for (const auto& weight : versions[s].at(rule.version(s, b))) leaves.push_back(weight.detach().clone().requires_grad_());
      h = Layer::apply(h, leaves);
    }
    h.sum().backward();
    for (int s = 0; s < p; ++s) {
      sums[s].resize(2);
      for (int i = 0; i < 2; ++i) sums[s][i] = sums[s][i].defined() ? sums[s][i] + used[s][i].grad() : used[s][i].grad();
      if (!rule.updates(b)) continue;
      std::vector<at::Tensor> next;
      for (int i = 0; i < 2; ++i) next.push_back(versions[s].back()[i].detach().sub(sums[s][i], kRate));
      versions[s].push_back(next);
      sums[s].clear();
    }
  }
  std::vector<std::vector<at::Tensor>> newest;
  for (const auto& stage : versions) newest.push_back(stage.back());
  return newest;
}

/// libtorch's, around a step, if it is on.
struct Autocast {
  explicit Autocast(bool on) {
    at::autocast::set_autocast_dtype(at::kCPU, at::kBFloat16);
    at::autocast::set_autocast_enabled(at::kCPU, on);
  }
  ~Autocast() {
    at::autocast::clear_cache();
    at::autocast::set_autocast_enabled(at::kCPU, false);
  }
  Autocast(const Autocast&) = delete;
  Autocast& operator=(const Autocast&) = delete;
};

void expect_lists_of_versions(int p, bool cast) {
  constexpr int kWidth = 4;
  for (const int m : {1, 4, 9}) {
    for (const Rule& rule : rules(p, m)) {
      SCOPED_TRACE(testing::Message() << rule.name << ", " << p << " stages, " << m << " micro-batches" << (cast ? ", autocast" : ""));
      const auto want = [&] {
        const Autocast autocast(cast);
        return by_lists(rule, p, m, kWidth);
      }();
      comm::run_ranks(p, [&](comm::World& world) {
        const Autocast autocast(cast);
        const int i = world.rank();
        Layer stage(i, p, kWidth);
        ExecutorOptions options{.ranks = world.group(), .device = testing_support::test_device()};
        options.weights = {{i, stage.weights}};
        options.update = [&](int) { descend(stage.weights); };
        Executor executor(rule.schedule, chain(p), {{i, &stage}}, options);
        executor.run();
        for (size_t k = 0; k < 2; ++k) EXPECT_TRUE(at::equal(stage.weights[k], want[i][k])) << "stage " << i << ", weight " << k;
      });
    }
  }
}

TEST(AsynchronousExecutor, EqualsListsOfVersionsBitForBit) {
  for (const int p : {1, 2, 3, 5}) expect_lists_of_versions(p, /*cast=*/false);
}

/// Whose cache of casts goes by the tensor that a weight is, in all of its versions.
TEST(AsynchronousExecutor, EqualsListsOfVersionsUnderAutocast) {
  for (const int p : {1, 2, 3}) expect_lists_of_versions(p, /*cast=*/true);
}

/// In bytes, under parameters: p - i times the stage's for PipeDream, p with vertical sync, 2 for 2BW, and not one more.
TEST(AsynchronousExecutor, HoldsTheVersionsOfTheFormulasInBytes) {
  constexpr int p = 4, m = 12, kWidth = 32;
  for (const Rule& rule : rules(p, m)) {
    SCOPED_TRACE(rule.name);
    const auto held = measure(rule.schedule, simulate(rule.schedule)).weight_versions;
    for (int i = 0; i < p; ++i) EXPECT_EQ(held[i], rule.name == std::string("2BW") ? 2 : rule.name == std::string("pipedream") ? p - i : p);
    comm::run_ranks(p, [&](comm::World& world) {
      const int i = world.rank();
      MemoryTracker tracker;
      const TrackMemory tracking(tracker);
      Layer stage(i, p, kWidth);
      for (const auto& weight : stage.weights) tracker.retag(weight, MemoryCategory::Parameters);
      const int64_t once = tracker.current(MemoryCategory::Parameters);
      EXPECT_EQ(once, (kWidth * kWidth + kWidth) * 4);
      int64_t most = 0;
      ExecutorOptions options{.ranks = world.group(), .device = testing_support::test_device()};
      options.weights = {{i, stage.weights}};
      options.update = [&](int) {
        most = std::max(most, tracker.current(MemoryCategory::Parameters));
        descend(stage.weights);
      };
      Executor executor(rule.schedule, chain(p), {{i, &stage}}, options);
      executor.run();
      EXPECT_EQ(most, held[i] * once) << "rank " << i;
      EXPECT_EQ(tracker.current(MemoryCategory::Parameters), once) << "rank " << i;
    });
  }
}

TEST(AsynchronousExecutor, AStageWithoutAnUpdateIsRefused) {
  Layer stage(0, 1, 2);
  EXPECT_THROW(Executor(schedules::pipedream(1, 2), chain(1), {{0, &stage}}, {.ranks = comm::Group::self()}), InternalError);
}

}  // namespace
}  // namespace tessera::pipeline
