// The executor against the same functions called one after the other on one thread: values that skip stages, integers, shapes that differ from micro-batch to
// micro-batch, stages that train nothing, every schedule, every engine that threads have.

#include "tessera/pipeline/executor.h"

#include <numeric>

#include <gmock/gmock.h>
#include <torch/torch.h>

#include "tessera/comm/testing.h"
#include "tessera/core/error.h"
#include "tessera/pipeline/schedules/forwards.h"
#include "tessera/pipeline/schedules/generators.h"
#include "tests/comm/order_alone.h"
#include "tests/test_device.h"

namespace tessera::pipeline {
namespace {

using schedules::Schedule;
using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr int kStages = 4;

/// h -> tanh(h w_s); stage 0 makes of a micro-batch's own rows also integers that stage 3 picks columns by, and stage 1 hands its output to stage 3, too.
Crossings with_skips(bool announced) {
  Crossings crossings = chain(kStages);
  crossings.push_back({.from = 0, .to = 3, .output = 1, .input = 1, .takes_gradient = false});
  crossings.push_back({.from = 1, .to = 3, .output = 0, .input = 2});
  for (Crossing& crossing : crossings) crossing.announced = announced;
  return crossings;
}

class ToyStage final : public Stage {
 public:
  ToyStage(int number, bool unequal, bool frozen) : number_(number), unequal_(unequal) {
    weight = torch::sin(torch::arange(36, torch::kDouble).view({6, 6}) * (number + 1)).requires_grad_(!frozen);
  }

  StageOutputs forward(int micro_batch, const std::vector<at::Tensor>& inputs) override {
    if (fails_at == micro_batch) throw std::runtime_error("as planted");
    if (refuses_at == micro_batch) throw ConfigError("as planted");
    const at::Tensor in = number_ == 0 ? data(micro_batch) : inputs[0];
    const at::Tensor out = torch::tanh(in.matmul(weight));
    if (number_ == 0) return {.values = {out, torch::arange(out.size(0)) % 6}};
    if (number_ + 1 < kStages) return {.values = {out}};
    const at::Tensor loss = (out * inputs[2]).gather(1, inputs[1].view({-1, 1})).sum();
    losses.push_back(loss.item<double>());
    return {.values = {}, .loss = loss};
  }

  std::optional<TensorSpec> input_spec(int micro_batch, int input) const override {
    if (unequal_) return std::nullopt;
    const int64_t rows = data(micro_batch).size(0);
    return input == 1 ? TensorSpec{{rows}, at::kLong} : TensorSpec{{rows, 6}, at::kDouble};
  }

  at::Tensor data(int micro_batch) const {
    const int64_t rows = unequal_ ? 2 + micro_batch : 3;
    return torch::cos(torch::arange(rows * 6, torch::kDouble).view({rows, 6}) * (micro_batch + 1));
  }

  at::Tensor weight;
  std::vector<double> losses;
  int fails_at = -1, refuses_at = -1;

 private:
  int number_;
  bool unequal_;
};

struct Result {
  std::map<int, at::Tensor> gradients;  ///< by stage
  std::vector<double> losses;
};

/// On one rank: what the others are held against.
Result one_after_the_other(int micro_batches, bool unequal, int frozen) {
  std::vector<ToyStage> stages;
  for (int s = 0; s < kStages; ++s) stages.emplace_back(s, unequal, s == frozen);
  for (int i = 0; i < micro_batches; ++i) {
    const auto first = stages[0].forward(i, {});
    const auto second = stages[1].forward(i, {first.values[0]});
    const auto third = stages[2].forward(i, {second.values[0]});
    stages[3].forward(i, {third.values[0], first.values[1], second.values[0]}).loss.backward();
  }
  Result result{.losses = stages[3].losses};
  for (int s = 0; s < kStages; ++s) result.gradients[s] = stages[static_cast<size_t>(s)].weight.grad();
  return result;
}

/// `channels`: of a world; by default its one group.
Result through(
    const Schedule& schedule, bool unequal, int frozen, const comm::RunOptions& options = {},
    const std::function<Channels(const comm::World&)>& channels = [](const comm::World& world) { return world.group(); }) {
  Result result;
  std::mutex mutex;
  comm::run_ranks(
      schedule.ranks(),
      [&](comm::World& world) {
        std::map<int, ToyStage> stages;
        std::map<int, Stage*> pointers;
        for (const int s : schedule.stages_of(world.rank())) pointers[s] = &stages.emplace(s, ToyStage(s, unequal, s == frozen)).first->second;
        Executor executor(schedule, with_skips(unequal), pointers, {.ranks = channels(world), .device = testing_support::test_device()});
        executor.run();
        const std::lock_guard lock(mutex);
        for (const auto& [s, stage] : stages) {
          result.gradients[s] = stage.weight.grad();
          if (s == kStages - 1) result.losses = stage.losses;
        }
      },
      options);
  return result;
}

void expect_same(const Result& got, const Result& want) {
  EXPECT_EQ(got.losses, want.losses);
  for (const auto& [stage, gradient] : want.gradients) {
    const at::Tensor& other = got.gradients.at(stage);
    ASSERT_EQ(other.defined(), gradient.defined()) << "stage " << stage;
    if (gradient.defined()) EXPECT_TRUE(torch::allclose(other, gradient, 1e-12, 1e-12)) << "stage " << stage;
  }
}

comm::RunOptions by_order_alone() { return {.decorators = {testing_support::order_alone(std::chrono::seconds(5))}}; }

/// A group for each direction.
Channels two_ways(const comm::World& world) {
  std::vector<int> all(static_cast<size_t>(world.size()));
  std::iota(all.begin(), all.end(), 0);
  return Channels(world.group(), world.subgroup(all, "back"), world.group());
}

std::vector<Schedule> schedules_of_four_stages(int m) {
  std::vector<Schedule> all{schedules::naive(4, m), schedules::gpipe(4, m),    schedules::one_f_one_b(4, m),      schedules::zb_h1(4, m),
                            schedules::zb_h2(4, m), schedules::naive(1, m, 4), schedules::breadth_first(2, m, 2), schedules::zb_v(2, m)};
  if (m % 2 == 0) all.push_back(schedules::interleaved(2, m, 2, 2));
  return all;
}

TEST(Executor, SkipsAndIntegersCrossStages) {
  for (const int m : {1, 4, 6}) {
    const Result want = one_after_the_other(m, false, -1);
    for (const Schedule& schedule : schedules_of_four_stages(m)) {
      SCOPED_TRACE(schedule.name + " of " + std::to_string(m));
      expect_same(through(schedule, false, -1), want);
    }
  }
  expect_same(through(schedules::one_f_one_b(4, 5), false, -1, {.backend = "gloo"}), one_after_the_other(5, false, -1));
}

/// As NCCL has it: with a group for each direction no rank waits in a circle, and every value finds the action that it is for; one group for both is refused,
/// for 1F1B would stand still there.
TEST(Executor, MessagesMayMeetByTheirOrderAlone) {
  const comm::RunOptions options = by_order_alone();
  for (const int m : {1, 4, 5}) {
    const Result want = one_after_the_other(m, false, -1);
    auto all = schedules_of_four_stages(m);
    if (m >= 4) all.push_back(schedules::dualpipev(2, m));
    for (const Schedule& schedule : all) {
      SCOPED_TRACE(schedule.name + " of " + std::to_string(m));
      expect_same(through(schedule, false, -1, options, two_ways), want);
    }
  }
  EXPECT_THAT(
      [&] { through(schedules::one_f_one_b(4, 5), false, -1, options); },
      ::testing::ThrowsMessage<ConfigError>(AllOf(HasSubstr("' send to each other under the schedule '1f1b'"), HasSubstr("give ExecutorOptions::ranks"))));
  EXPECT_THROW(through(schedules::one_f_one_b(4, 5), true, -1, options, two_ways), InternalError) << "announced values";
}

/// Where a rank's next stage is behind the others', it receives for that before it has sent anything; one micro-batch leaves nothing to send before.
TEST(Executor, ForwardsAloneMayMeetByTheirOrderAlone) {
  for (const int m : {1, 3}) {
    const Result want = one_after_the_other(m, false, -1);
    for (const std::vector<int>& rank_of : {std::vector{0, 1, 2, 3}, {0, 1, 0, 1}, {0, 1, 1, 0}, {0, 1, 2, 0}, {2, 0, 1, 2}}) {
      const Schedule schedule = schedules::forwards(rank_of, std::ranges::max(rank_of) + 1, m);
      EXPECT_EQ(through(schedule, false, -1, by_order_alone(), two_ways).losses, want.losses) << m << ", the last on rank " << rank_of.back();
    }
  }
}

TEST(Executor, ShapesMayDifferFromMicroBatchToMicroBatch) {
  const Result want = one_after_the_other(5, true, -1);
  for (const Schedule& schedule : schedules_of_four_stages(5)) expect_same(through(schedule, true, -1), want);
  expect_same(through(schedules::zb_v(2, 5), true, -1, {.backend = "gloo"}), want);
}

TEST(Executor, StagesMayTrainNothing) {
  for (const int frozen : {0, 2, 3}) expect_same(through(schedules::one_f_one_b(4, 4), false, frozen), one_after_the_other(4, false, frozen));
}

TEST(Executor, ErrorsNameStageAndMicroBatch) {
  const auto failure = [](int fails, int refuses) -> std::string {
    try {
      comm::run_ranks(4, [&](comm::World& world) {
        ToyStage stage(world.rank(), false, false);
        if (world.rank() == 2) stage.fails_at = fails, stage.refuses_at = refuses;
        Executor executor(schedules::one_f_one_b(4, 6), with_skips(false), {{world.rank(), &stage}},
                          {.ranks = world.group(), .device = testing_support::test_device()});
        executor.run();
      });
    } catch (const std::exception& error) {
      return error.what();
    }
    return "(none)";
  };
  EXPECT_THAT(failure(-1, 5), AllOf(HasSubstr("rank 2: "), HasSubstr("stage 2, forward of micro-batch 5: as planted")));
  EXPECT_THAT(failure(3, -1), HasSubstr("as planted"));
  EXPECT_EQ(failure(-1, -1), "(none)");
}

/// Values that were sent and not taken would match the next step's receives, also those of another executor.
TEST(Executor, AStepAfterOneThatEndedInItsMidstIsRefused) {
  comm::run_ranks(2, [](comm::World& world) {
    ToyStage stage(world.rank(), false, false);
    stage.refuses_at = world.rank() == 0 ? 2 : 0;  // one has sent two values by then, and the other has taken one
    const auto run = [&](const Schedule& schedule) {
      Executor(schedule, chain(2), {{world.rank(), &stage}}, {.ranks = world.group(), .device = testing_support::test_device()}).run();
    };
    EXPECT_ANY_THROW(run(schedules::gpipe(2, 3)));
    stage.refuses_at = -1;
    EXPECT_THAT([&] { run(schedules::one_f_one_b(2, 3)); },
                ::testing::ThrowsMessage<Error>(
                    AllOf(HasSubstr("an earlier step between the ranks of group 'world' ended in its midst (stage "), HasSubstr("forward of micro-batch "))));
  });
}

TEST(Executor, ForwardsAloneKeepNothing) {
  Schedule schedule = schedules::gpipe(4, 3);
  for (auto& list : schedule.actions) std::erase_if(list, [](const schedules::Action& action) { return action.kind != schedules::Kind::Forward; });
  const Result want = one_after_the_other(3, false, -1);
  comm::run_ranks(4, [&](comm::World& world) {
    const at::NoGradGuard no_grad;
    ToyStage stage(world.rank(), false, false);
    Executor executor(schedule, with_skips(false), {{world.rank(), &stage}}, {.ranks = world.group(), .device = testing_support::test_device()});
    executor.run();
    if (world.rank() == 3) EXPECT_EQ(stage.losses, want.losses);
  });
}

TEST(Itinerary, PostsWhatTheNextActionNeedsInTheOrderOfItsSender) {
  const Schedule schedule = schedules::one_f_one_b(2, 3);  // rank 0: F0 F1 B0 F2 B1 B2; rank 1: F0 B0 F1 B1 F2 B2
  const auto legs = itinerary(schedule, chain(2), 1);
  ASSERT_EQ(legs.size(), 6U);
  const auto forward = [](int i) { return Message{.crossing = 0, .micro_batch = i, .gradient = false, .peer = 0}; };
  EXPECT_EQ(legs[0].posts, std::vector{forward(0)});
  EXPECT_EQ(legs[1].posts, std::vector{forward(1)});  // before B0, for F1
  EXPECT_TRUE(legs[1].needs.empty());
  EXPECT_EQ(legs[1].sends, (std::vector{Message{.crossing = 0, .micro_batch = 0, .gradient = true, .peer = 0}}));
  const auto first = itinerary(schedule, chain(2), 0);
  EXPECT_EQ(first[1].posts, (std::vector{Message{.crossing = 0, .micro_batch = 0, .gradient = true, .peer = 1}}));
  for (const Schedule& each : schedules_of_four_stages(4)) {
    for (int rank = 0; rank < each.ranks(); ++rank) {
      size_t posts = 0, needs = 0;
      for (const Leg& leg : itinerary(each, with_skips(false), rank)) {
        posts += leg.posts.size();
        needs += leg.needs.size();
        EXPECT_GE(posts, needs);
      }
      EXPECT_EQ(posts, needs) << each.name;
    }
  }
}

}  // namespace
}  // namespace tessera::pipeline
