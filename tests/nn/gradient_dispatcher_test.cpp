#include "tessera/nn/gradient_dispatcher.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/nn/modules/linear.h>

#include "tessera/core/error.h"

namespace tessera::nn {
namespace {

using ::testing::ElementsAre;

TEST(GradientDispatcher, ServesSeveralListenersOfAPlainModuleInOrder) {
  torch::nn::Linear linear(2, 3);
  std::vector<std::string> log;
  auto& dispatcher = GradientDispatcher::of(linear->weight);
  EXPECT_EQ(&dispatcher, &GradientDispatcher::of(linear->weight));
  auto a = dispatcher.listen([&](const at::Tensor& parameter) {
    EXPECT_TRUE(parameter.grad().defined());
    log.push_back("a");
  });
  auto b = dispatcher.listen([&](const at::Tensor&) { log.push_back("b"); });
  linear(at::ones({4, 2})).sum().backward();
  EXPECT_THAT(log, ElementsAre("a", "b"));
  a.detach();
  linear(at::ones({4, 2})).sum().backward();
  EXPECT_THAT(log, ElementsAre("a", "b", "b"));
}

TEST(GradientDispatcher, AccumulatedOncePerBackwardHoweverOftenUsed) {
  at::Tensor weight = at::ones({2}).requires_grad_();
  int calls = 0;
  const auto listening = GradientDispatcher::of(weight).listen([&](const at::Tensor&) { ++calls; });
  (weight * 2 + weight * weight + weight.sum()).sum().backward();
  EXPECT_EQ(calls, 1);
  EXPECT_TRUE(at::equal(weight.grad(), at::full({2}, 6.0)));
}

TEST(GradientDispatcher, FinalIsTheLastMicroBatchOnceAStep) {
  at::Tensor weight = at::ones({2}).requires_grad_();
  auto phase = std::make_shared<StepPhase>();
  auto& dispatcher = GradientDispatcher::of(weight);
  dispatcher.follow(phase);
  std::vector<float> finals;
  const auto listening = dispatcher.listen_final([&](const at::Tensor& parameter) { finals.push_back(parameter.grad()[0].item<float>()); });
  for (int step = 0; step < 2; ++step) {
    phase->step = step;
    for (int micro = 0; micro < 3; ++micro) {
      phase->last_micro_batch = micro == 2;
      weight.sum().backward();
    }
    dispatcher.announce_final();  // said already: no second call
  }
  EXPECT_THAT(finals, ElementsAre(3.F, 6.F));
  phase->step = 2;  // unused in this step: only the engine can say so
  dispatcher.announce_final();
  EXPECT_EQ(finals.size(), 3u);
}

TEST(GradientDispatcher, WithoutAPhaseEveryBackwardIsFinal) {
  at::Tensor weight = at::ones({2}).requires_grad_();
  int finals = 0;
  const auto listening = GradientDispatcher::of(weight).listen_final([&](const at::Tensor&) { ++finals; });
  weight.sum().backward();
  weight.sum().backward();
  EXPECT_EQ(finals, 2);
}

TEST(GradientDispatcher, WaitsForPromisedDeliveries) {
  at::Tensor weight = at::ones({2}).requires_grad_();
  auto& dispatcher = GradientDispatcher::of(weight);
  int accumulated = 0, finals = 0;
  auto a = dispatcher.listen([&](const at::Tensor&) { ++accumulated; });
  auto b = dispatcher.listen_final([&](const at::Tensor&) { ++finals; });
  dispatcher.expect();
  weight.sum().backward();
  EXPECT_EQ(finals, 0);
  dispatcher.deliver(at::full({2}, 4.0));
  EXPECT_EQ(accumulated, 2);
  EXPECT_EQ(finals, 1);
  EXPECT_TRUE(at::equal(weight.grad(), at::full({2}, 5.0)));
  EXPECT_THROW(dispatcher.deliver(at::ones({3})), InternalError);
}

/// What has a gradient for its first argument alone.
struct FirstAlone : torch::autograd::Function<FirstAlone> {
  static at::Tensor forward(torch::autograd::AutogradContext*, const at::Tensor& a, const at::Tensor& b) { return a + b; }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*, torch::autograd::variable_list gradients) {
    return {gradients.at(0), at::Tensor()};
  }
};

TEST(GradientDispatcher, TellsNobodyWhereNothingIsAccumulated) {
  for (const bool hears_arrivals : {true, false}) {
    for (const bool had_gradient : {false, true}) {
      at::Tensor weight = at::ones({2}).requires_grad_(), other = at::ones({2}).requires_grad_();
      auto& dispatcher = GradientDispatcher::of(weight);
      std::vector<std::string> log;
      Attachment listening;
      if (hears_arrivals) listening.add(dispatcher.listen_arriving([&](const at::Tensor&) { log.push_back("arriving"); }));
      listening.add(dispatcher.listen([&](const at::Tensor&) { log.push_back("accumulated"); }));
      listening.add(dispatcher.listen_final([&](const at::Tensor&) { log.push_back("final"); }));
      if (had_gradient && hears_arrivals) weight.mutable_grad() = at::full({2}, 7.0);  // only who hears arrivals can tell
      FirstAlone::apply(other, weight).sum().backward();
      EXPECT_TRUE(other.grad().defined());
      EXPECT_THAT(log, ElementsAre()) << "a function without a gradient for it";
      const at::Tensor loss = (other * weight).sum();
      weight.set_requires_grad(false);
      loss.backward();
      EXPECT_THAT(log, ElementsAre()) << "frozen between forward and backward";
      EXPECT_EQ(weight.grad().defined(), had_gradient && hears_arrivals);
      weight.set_requires_grad(true);
      (other * weight).sum().backward();
      EXPECT_EQ(log.size(), hears_arrivals ? 3u : 2u) << "once something comes again";
    }
  }
}

TEST(GradientDispatcher, DeliverAccumulatesIntoAViewAndCasts) {
  at::Tensor weight = at::ones({2}).requires_grad_();
  at::Tensor bucket = at::zeros({4});
  weight.mutable_grad() = bucket.narrow(0, 2, 2);
  GradientDispatcher::of(weight).deliver(at::ones({2}, at::kBFloat16));
  EXPECT_TRUE(at::equal(bucket, at::tensor({0.F, 0.F, 1.F, 1.F})));
  at::Tensor fresh = at::ones({2}).requires_grad_();
  GradientDispatcher::of(fresh).deliver(at::ones({2}, at::kBFloat16));
  EXPECT_EQ(fresh.grad().scalar_type(), at::kFloat);
}

TEST(GradientDispatcher, DeliverGoesThroughTheParametersHooks) {
  at::Tensor weight = at::ones({2}).requires_grad_();
  weight.register_hook([](const at::Tensor& gradient) { return gradient * 2; });
  int arrivals = 0;
  auto& dispatcher = GradientDispatcher::of(weight);
  const auto a = dispatcher.listen_arriving([&](const at::Tensor&) { ++arrivals; });
  dispatcher.deliver(at::ones({2}));
  EXPECT_TRUE(at::equal(weight.grad(), at::full({2}, 2.0)));
  EXPECT_EQ(arrivals, 1);
}

TEST(GradientDispatcher, KeepsAHookThatWasThereBefore) {
  struct Foreign : torch::autograd::PostAccumulateGradHook {
    explicit Foreign(int& calls) : calls(calls) {}
    void operator()(const at::Tensor&) override { ++calls; }
    int& calls;
  };
  at::Tensor weight = at::ones({2}).requires_grad_();
  int theirs = 0, ours = 0;
  torch::autograd::impl::set_post_acc_grad_hooks(weight, std::make_unique<Foreign>(theirs));
  const auto listening = GradientDispatcher::of(weight).listen([&](const at::Tensor&) { ++ours; });
  weight.sum().backward();
  EXPECT_EQ(theirs, 1);
  EXPECT_EQ(ours, 1);
}

TEST(GradientDispatcher, TensorsDieBeforeTheirListenersAndAreNotKept) {
  Attachment listening;
  c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl> weak{c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>()};
  {
    at::Tensor weight = at::ones({2}).requires_grad_();
    weak = decltype(weak)(weight.getIntrusivePtr());
    listening = GradientDispatcher::of(weight).listen([](const at::Tensor&) {});
    weight.sum().backward();
  }
  EXPECT_TRUE(weak.expired());
  listening.detach();
}

TEST(GradientDispatcher, AListenerMayDetachItselfAndComeDuringACall) {
  at::Tensor weight = at::ones({2}).requires_grad_();
  auto& dispatcher = GradientDispatcher::of(weight);
  std::vector<std::string> log;
  Attachment once, late;
  once = dispatcher.listen([&](const at::Tensor&) {
    log.push_back("once");
    late = dispatcher.listen([&](const at::Tensor&) { log.push_back("late"); });
    once.detach();
  });
  weight.sum().backward();
  weight.sum().backward();
  EXPECT_THAT(log, ElementsAre("once", "late"));
}

TEST(GradientDispatcher, OnlyLeavesThatTakeGradients) {
  EXPECT_THROW(GradientDispatcher::of(at::ones({2}, at::kLong)), InternalError);
  at::Tensor weight = at::ones({2}).requires_grad_();
  EXPECT_THROW(GradientDispatcher::of(weight * 2), InternalError);
}

TEST(GradientDispatcher, PlaceIsOfferedOnceAndOnlyForAFirstGradient) {
  at::Tensor weight = at::ones({2, 3}).requires_grad_();
  EXPECT_FALSE(GradientDispatcher::take_place(weight).defined()) << "nobody offers one";
  auto& dispatcher = GradientDispatcher::of(weight);
  const at::Tensor place = at::zeros({2, 3});
  dispatcher.offer_place(place);
  EXPECT_FALSE(dispatcher.is_place_taken());
  EXPECT_EQ(GradientDispatcher::take_place(weight).memory.const_data_ptr(), place.const_data_ptr());
  EXPECT_TRUE(dispatcher.is_place_taken());
  EXPECT_FALSE(GradientDispatcher::take_place(weight).defined()) << "taken";
  dispatcher.offer_place(place);
  EXPECT_FALSE(dispatcher.is_place_taken());
  weight.sum().backward();
  EXPECT_FALSE(GradientDispatcher::take_place(weight).defined()) << "there is a gradient that it would have to be added to";
  weight.mutable_grad().reset();
  dispatcher.withdraw_place();
  EXPECT_FALSE(GradientDispatcher::take_place(weight).defined()) << "withdrawn";
  EXPECT_FALSE(GradientDispatcher::take_place(weight.detach()).defined());
}

TEST(GradientDispatcher, GradientsAreAddedInPlaceWhereNobodyWantsToSeeEach) {
  const at::Tensor weight = at::ones({2, 3}).requires_grad_();
  auto& dispatcher = GradientDispatcher::of(weight);
  EXPECT_FALSE(GradientDispatcher::adds_in_place(weight));
  dispatcher.add_in_place(true);
  const auto first = GradientDispatcher::take_place(weight);
  EXPECT_EQ(first.memory.sizes(), weight.sizes());
  EXPECT_FALSE(first.holds_sum) << "there is no gradient yet";
  weight.sum().backward();
  const void* const memory = weight.grad().const_data_ptr();
  const auto next = GradientDispatcher::take_place(weight);
  EXPECT_TRUE(next.holds_sum);
  EXPECT_EQ(next.memory.const_data_ptr(), memory);
  EXPECT_FALSE(weight.grad().defined()) << "whoever took it gives it back";
  const at::Tensor hooked = at::ones({2}).requires_grad_();
  hooked.register_hook([](const at::Tensor&) {});
  GradientDispatcher::of(hooked).add_in_place(true);
  EXPECT_FALSE(GradientDispatcher::take_place(hooked).defined()) << "a program looks at each contribution";
  const at::Tensor heard = at::ones({2}).requires_grad_();
  const auto listening = GradientDispatcher::of(heard).listen_arriving([](const at::Tensor&) {});
  GradientDispatcher::of(heard).add_in_place(true);
  EXPECT_FALSE(GradientDispatcher::take_place(heard).defined()) << "a synchronizer does";
  dispatcher.add_in_place(false);
  EXPECT_FALSE(GradientDispatcher::take_place(weight).defined());
}

TEST(GradientDispatcher, ArrivingComesBeforeEachAccumulationAndNotWhereAGradientIsOnlyRead) {
  at::Tensor weight = at::ones({2}).requires_grad_();
  std::vector<bool> had_gradient;
  auto& dispatcher = GradientDispatcher::of(weight);
  auto listening = dispatcher.listen_arriving([&](const at::Tensor& parameter) { had_gradient.push_back(parameter.grad().defined()); });
  weight.sum().backward();
  torch::autograd::grad({weight.sum()}, {weight});
  weight.sum().backward();
  dispatcher.deliver(at::ones({2}));
  EXPECT_THAT(had_gradient, ElementsAre(false, true, true));
  EXPECT_TRUE(at::equal(weight.grad(), at::full({2}, 3.0)));
  listening.detach();
  weight.sum().backward();
  EXPECT_EQ(had_gradient.size(), 3u);
}

TEST(GradientDispatcher, ArrivalsAndHooksOfTheUserLiveTogether) {
  at::Tensor weight = at::ones({2}).requires_grad_();
  int arrived = 0, seen = 0;
  const auto listening = GradientDispatcher::of(weight).listen_arriving([&](const at::Tensor&) { ++arrived; });
  weight.register_hook([&](const at::Tensor& gradient) {
    ++seen;
    return gradient * 2;
  });
  weight.sum().backward();
  EXPECT_EQ(arrived, 1);
  EXPECT_EQ(seen, 1);
  EXPECT_TRUE(at::equal(weight.grad(), at::full({2}, 2.0)));
}

TEST(GradientDispatcher, ServesAParameterThatIsFrozenAtFirst) {
  torch::nn::Linear linear(2, 3);
  linear->weight.requires_grad_(false);
  EXPECT_EQ(GradientDispatcher::find(linear->weight), nullptr);
  int arrived = 0, accumulated = 0;
  auto& dispatcher = GradientDispatcher::of(linear->weight);
  EXPECT_EQ(GradientDispatcher::find(linear->weight), &dispatcher);
  auto a = dispatcher.listen_arriving([&](const at::Tensor&) { ++arrived; });
  auto b = dispatcher.listen([&](const at::Tensor&) { ++accumulated; });
  for (const bool trained : {false, true, false, true}) {
    linear->weight.requires_grad_(trained);
    linear(at::ones({4, 2})).sum().backward();
  }
  EXPECT_EQ(arrived, 2);
  EXPECT_EQ(accumulated, 2);
}

TEST(GradientDispatcher, TheLastClaimCountsAndTheOneBeforeWhenItGoes) {
  const at::Tensor weight = at::ones({2}).requires_grad_();
  auto& dispatcher = GradientDispatcher::of(weight);
  auto* const first = reinterpret_cast<GradientSynchronizer*>(0x10);
  auto* const second = reinterpret_cast<GradientSynchronizer*>(0x20);
  EXPECT_EQ(dispatcher.owner(), nullptr);
  auto a = dispatcher.claim(first), b = dispatcher.claim(second);
  EXPECT_EQ(dispatcher.owner(), second);
  b.detach();
  EXPECT_EQ(dispatcher.owner(), first);
  a.detach();
  EXPECT_EQ(dispatcher.owner(), nullptr);
}

}  // namespace
}  // namespace tessera::nn
