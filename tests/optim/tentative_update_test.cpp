#include "tessera/optim/tentative_update.h"

#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <gtest/gtest.h>

#include "tessera/core/error.h"
#include "tessera/memory/memory.h"

namespace tessera::optim {
namespace {

OptimConfig of_kind(const std::string& name) {
  OptimConfig config;
  config.name = name;
  config.momentum = 0.9;
  config.weight_decay = 0.1;
  return config;
}

/// Two updates, with others between that are taken back: the bits of the two alone.
TEST(TentativeUpdate, LeavesNoTraceWhereItIsTakenBack) {
  for (const char* name : {"adamw", "sgd"}) {
    const auto run = [&](bool tentative) {
      std::vector<nn::NamedParameter> parameters{{"a", at::ones({3, 5}).requires_grad_(), {}}, {"b", at::full({7}, 0.5).requires_grad_(), {}}};
      const auto optimizer = make_optimizer(of_kind(name), parameters);
      TentativeUpdate update(*optimizer, parameters);
      for (int step = 0; step < 2; ++step) {
        for (const auto& parameter : parameters) parameter.tensor.mutable_grad() = at::full(parameter.tensor.sizes(), 0.25 + step);
        if (tentative) {
          update.make(0.5);
          update.take_back();
          EXPECT_FALSE(update.made());
          update.make(0.1);
          update.keep();
        } else {
          optimizer->step(0.1);
        }
      }
      EXPECT_EQ(optimizer->update_counts().at("a"), 2);
      std::vector<at::Tensor> all;
      for (const auto& parameter : parameters) all.push_back(parameter.tensor.detach().clone());
      for (const auto& state : optimizer->state()) all.push_back(state.tensor.clone());
      return all;
    };
    const auto plain = run(false), tried = run(true);
    ASSERT_EQ(plain.size(), tried.size());
    for (size_t i = 0; i < plain.size(); ++i) EXPECT_TRUE(at::equal(plain[i], tried[i])) << name << ", tensor " << i;
  }
}

TEST(TentativeUpdate, HoldsWhatItChangesUntilItStands) {
  std::vector<nn::NamedParameter> parameters{{"a", at::ones({100, 10}).requires_grad_(), {}}};
  const auto optimizer = make_optimizer(of_kind("adamw"), parameters);
  parameters[0].tensor.mutable_grad() = at::ones({100, 10});
  MemoryTracker tracker;
  const TrackMemory tracking(tracker);
  TentativeUpdate update(*optimizer, parameters);
  update.make(0.1);
  EXPECT_EQ(tracker.current(), 3 * 4000) << "the weight and two moments";
  EXPECT_THROW(update.make(0.1), InternalError);
  update.keep();
  EXPECT_EQ(tracker.current(), 0);
  EXPECT_THROW(update.take_back(), InternalError);
}

}  // namespace
}  // namespace tessera::optim
