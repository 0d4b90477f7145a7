#include "tessera/precision/non_finite.h"

#include <cmath>
#include <limits>

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tessera/comm/testing.h"
#include "tessera/nn/attach.h"
#include "tessera/nn/linear.h"

namespace tessera::precision {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

struct TwoImpl : nn::Module {
  TwoImpl() : first(3, 4), second(4, 2) {
    register_module("first", first);
    register_module("second", second);
    nn::assign_paths(*this);
  }
  at::Tensor forward(const at::Tensor& x) { return second(at::tanh(first(x))); }
  nn::Linear first, second;
};

void run(TwoImpl& model, const at::Tensor& x, double loss_factor = 1) { (nn::call(model, x).sum() * loss_factor).backward(); }

TEST(NonFinite, NamesTheFirstModuleOfTheForwardPass) {
  const auto held = std::make_shared<TwoImpl>();
  TwoImpl& model = *held;
  const auto parameters = nn::unique_parameters(model);
  model.second->weight.detach()[1][2] = std::numeric_limits<float>::infinity();
  const NonFiniteWatch watch(model, parameters);
  run(model, at::ones({2, 3}));
  EXPECT_EQ(watch.found(), "the output of 'second'");
}

TEST(NonFinite, NamesTheFirstGradientWhereOutputsAreFinite) {
  const auto held = std::make_shared<TwoImpl>();
  TwoImpl& model = *held;
  const NonFiniteWatch watch(model, nn::unique_parameters(model));
  run(model, at::ones({2, 3}));
  EXPECT_EQ(watch.found(), "");
  run(model, at::ones({2, 3}), std::numeric_limits<double>::infinity());
  EXPECT_THAT(watch.found(), HasSubstr("the gradient of 'second."));
}

TEST(NonFinite, LooksNoLongerThanItLives) {
  const auto held = std::make_shared<TwoImpl>();
  TwoImpl& model = *held;
  {
    const NonFiniteWatch watch(model, nn::unique_parameters(model));
    EXPECT_TRUE(model.first->intercepted());
  }
  EXPECT_FALSE(model.first->intercepted());
}

TEST(NonFinite, EveryRankLearnsWhichRankItWas) {
  for (const int world : {1, 2, 3}) {
    comm::run_ranks(world, [&](comm::World& ranks) {
      const auto held = std::make_shared<TwoImpl>();
      TwoImpl& model = *held;
      const NonFiniteWatch watch(model, nn::unique_parameters(model));
      const bool bad = ranks.rank() == world - 1;
      run(model, at::full({2, 3}, bad ? std::nan("") : 1.0));
      const auto text = describe_non_finite(watch, ranks.group());
      EXPECT_THAT(text, HasSubstr("on rank " + std::to_string(world - 1) + " the output of 'first' is the first that is not finite"));
      if (world > 1) EXPECT_THAT(text, Not(HasSubstr("on rank 0")));
    });
  }
}

TEST(NonFinite, SaysSoWhereNothingIsFound) {
  const auto held = std::make_shared<TwoImpl>();
  TwoImpl& model = *held;
  const NonFiniteWatch watch(model, nn::unique_parameters(model));
  run(model, at::ones({2, 3}));
  EXPECT_THAT(describe_non_finite(watch, comm::Group::self()), HasSubstr("found every output and gradient finite"));
}

}  // namespace
}  // namespace tessera::precision
