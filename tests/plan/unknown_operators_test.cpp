// Operators that no one who wrote the plan has heard of: a user's, with a meta kernel or without one, and those of libtorch that do more than move bytes.

#include <string>
#include <vector>

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/sigmoid.h>
#include <gmock/gmock.h>
#include <torch/library.h>

#include "tessera/memory/memory.h"
#include "tessera/nn/record_events.h"
#include "tessera/plan/device.h"
#include "tessera/plan/dry_run.h"
#include "tessera/plan/html_report.h"
#include "tessera/plan/operator_time.h"
#include "tessera/plan/rank_clock.h"
#include "tessera/plan/read_events.h"
#include "tessera/plan/stand_ins.h"
#include "tests/refusal.h"
#include "tests/train/fixture.h"

namespace tessera::plan {
namespace {

using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;
using testing_support::refusal;

// ---- a user's operators

at::Tensor gate(const at::Tensor& x) { return at::sigmoid(x).narrow(-1, 0, x.size(-1) / 2).contiguous(); }
at::Tensor& halve(at::Tensor& x) { return x.mul_(0.5); }
at::Tensor same_as(const at::Tensor& x) { return at::empty_like(x); }
at::Tensor picky(const at::Tensor& x) {
  TORCH_CHECK(x.sum().item<double>() != 0, "nothing to divide by");
  return x / x.sum();
}

TORCH_LIBRARY(tessera_users, m) {
  m.def("gate(Tensor x) -> Tensor");
  m.def("halve_(Tensor(a!) x) -> Tensor(a!)");
  m.def("swish(Tensor x) -> Tensor");
  m.def("picky(Tensor x) -> Tensor");
  m.def("nowhere(Tensor x) -> Tensor");
}
TORCH_LIBRARY_IMPL(tessera_users, CPU, m) {
  m.impl("gate", gate);
  m.impl("halve_", halve);
  m.impl("swish", gate);
  m.impl("picky", picky);
}
TORCH_LIBRARY_IMPL(tessera_users, Meta, m) { m.impl("swish", same_as); }

at::Tensor users(const std::string& name, const at::Tensor& x) {
  torch::jit::Stack stack{x};
  c10::Dispatcher::singleton().findSchemaOrThrow(("tessera_users::" + name).c_str(), "").callBoxed(&stack);
  return stack.back().toTensor();
}

at::Tensor input() { return at::empty({3, 10}, at::TensorOptions(at::kMeta)); }

/// What a step of a user's program does.
struct OwnStep {
  MemoryTracker memory;
  TrackMemory track{memory};
  EventStream stream;
  std::shared_ptr<StandIns> stand_ins = std::make_shared<StandIns>();
  nn::OperatorScope standing_in{stand_ins};
  nn::RecordEvents listening{stream};
};

TEST(StandInsTest, ShapesAreThoseOfTheKernelAndBytesThoseOfTheResult) {
  OwnStep step;
  const at::Tensor x = input();
  const int64_t before = step.memory.current();
  step.memory.reset_peak();
  const at::Tensor made = users("gate", x);
  EXPECT_TRUE(made.is_meta());
  EXPECT_THAT(made.sizes().vec(), ElementsAre(3, 5));
  EXPECT_EQ(step.memory.current() - before, 3 * 5 * 4) << "no more than what is made";
  EXPECT_EQ(step.memory.peak() - before, 3 * 5 * 4) << "nor what the kernel took meanwhile";
  EXPECT_THAT(step.stand_ins->names(), ElementsAre("tessera_users::gate"));
  const auto ran = only<OperatorEvent>(step.stream.take());
  ASSERT_EQ(ran.size(), 1U) << "what the kernel of a CPU is made of is no part of the step";
  EXPECT_EQ(ran[0].name, "tessera_users::gate");
  EXPECT_EQ(ran[0].read_bytes, 3 * 10 * 4);
  EXPECT_EQ(ran[0].written_bytes, 3 * 5 * 4);
}

TEST(StandInsTest, WhatIsChangedInPlaceIsTheArgument) {
  OwnStep step;
  const at::Tensor x = input();
  EXPECT_TRUE(users("halve_", x).is_same(x));
}

TEST(StandInsTest, WhoHasAMetaKernelOrValuesIsLeftAlone) {
  OwnStep step;
  EXPECT_THAT(users("swish", input()).sizes().vec(), ElementsAre(3, 10)) << "of the meta kernel; that of a CPU would make half of it";
  EXPECT_FALSE(users("gate", at::ones({2, 4})).is_meta());
  EXPECT_TRUE(step.stand_ins->names().empty());
}

TEST(StandInsTest, RefusesByName) {
  OwnStep step;
  EXPECT_THAT(refusal([] { users("nowhere", input()); }), AllOf(HasSubstr("operator tessera_users::nowhere: has no meta kernel"), HasSubstr("none for a CPU"),
                                                                HasSubstr("TORCH_LIBRARY_IMPL(tessera_users, Meta, m)")));
  EXPECT_THAT(refusal([] { users("picky", input()); }), AllOf(HasSubstr("tessera_users::picky"), HasSubstr("nothing to divide by")));
  const at::Tensor large = at::empty({StandIns::kMostBytes / 4 + 1}, at::TensorOptions(at::kMeta));
  EXPECT_THAT(refusal([&] { users("gate", large); }), AllOf(HasSubstr("tessera_users::gate"), HasSubstr("too many")));
}

// ---- what it takes

TEST(HasCost, OfProductsAndWhatMovesBytes) {
  EXPECT_TRUE(has_cost({.name = "aten::mul"}));
  EXPECT_TRUE(has_cost({.name = "tessera::rope"}));
  EXPECT_TRUE(has_cost({.name = "mine::attention", .flops = 1}));
  EXPECT_FALSE(has_cost({.name = "mine::attention"}));
  EXPECT_FALSE(has_cost({.name = "aten::_scaled_dot_product_efficient_attention"})) << "whose FLOPs nobody counts";
  EXPECT_FALSE(has_cost({.name = "aten::topk"}));
  EXPECT_FALSE(has_cost({.name = "aten::convolution_backward"}));
  const OperatorHabit habit{.name = "mine::", .passes = 2};
  EXPECT_TRUE(has_cost({.name = "mine::swish"}, &habit)) << "a framework's file says so";
}

TEST(Guesses, AUsersOperatorIsNamedWithTheTimeOfItsBytes) {
  OwnStep step;
  const at::Tensor x = input();
  users("gate", x);
  users("swish", x);
  users("swish", x);
  at::mul(x, x);
  const Machine machine{.device = {.memory_bandwidth = 100, .memory_share = 1, .kernel_gap = 0, .launch = 0}};
  RankClock clock(machine, [](const std::string&) { return Placement{}; });
  for (const Event& event : step.stream.take()) clock.read(event);
  const RankTime time = clock.time();
  EXPECT_DOUBLE_EQ(time.computing, 1.8 + 2 * 2.4 + 3.6);
  ASSERT_EQ(time.guessed.size(), 2U);
  EXPECT_DOUBLE_EQ(time.guessed.at("tessera_users::gate"), 1.8);
  EXPECT_DOUBLE_EQ(time.guessed.at("tessera_users::swish"), 2 * 2.4);
  EXPECT_DOUBLE_EQ(step_time({{.time = &time}}).guessed, 1.8 + 2 * 2.4);
}

class GuessesOfAPlan : public testing_support::TrainFixture {};

TEST_F(GuessesOfAPlan, AreNamedInTextJsonAndReport) {
  const Device device = find_device("h100");
  for (const int stages : {1, 2}) {
    const Config mixture = config("mixtral", {"model.router=expert_choice", "mesh.pp=" + std::to_string(stages)});
    const DryRun run = dry_run(mixture, stages, {.machine = machine_of(device), .history = true});
    ASSERT_FALSE(run.ranks[0].guessed.empty());
    const GuessedOperator& guess = run.ranks[0].guessed.back();
    EXPECT_EQ(guess.name, "aten::sort");
    EXPECT_EQ(guess.count % run.ranks[0].micro_batches, 0) << "a call a layer and micro-batch, of all of them and not of those that were run";
    EXPECT_GE(guess.count, run.ranks[0].micro_batches);
    EXPECT_GT(guess.seconds, 0);
    EXPECT_GT(run.time->guessed, 0);
    EXPECT_LT(run.time->guessed, run.time->computing);
    EXPECT_THAT(to_string(run), AllOf(HasSubstr("% of the step is a guess: "), HasSubstr("aten::sort (" + std::to_string(guess.count) + " x, ")));
    const auto json = to_json(run);
    EXPECT_EQ(json["time"]["guessed"], run.time->guessed);
    EXPECT_EQ(json["ranks"][0]["guessed"].back()["name"], "aten::sort");
    EXPECT_EQ(json["ranks"][0]["guessed"].back()["has_meta_kernel"], true);
    EXPECT_THAT(html_report({.config = mixture, .run = run, .device = &device, .json = json}), HasSubstr("is a guess: what these operators take"));
  }
  const DryRun plain = dry_run(config("llama"), 1);
  EXPECT_EQ(guesses_of(plain), "") << "nothing of a dense model";
  EXPECT_EQ(guesses_of(dry_run(config("mixtral"), 1)), "") << "nor of a router that chooses by a kernel of ours";
  EXPECT_EQ(guesses_of(dry_run(config("mixtral", {"data.documents=lines"}), 1)), "") << "and leaves padding out";
  EXPECT_THAT(guesses_of(dry_run(config("mixtral", {"model.router=expert_choice"}), 1)), testing::StartsWith("what these operators take"))
      << "no share without a device";
}

}  // namespace
}  // namespace tessera::plan
