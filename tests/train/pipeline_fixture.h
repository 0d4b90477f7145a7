// A small model that is cut into stages, beside one device.
#pragma once

#include "tests/train/fixture.h"

namespace tessera::testing_support {

class PipelineFixture : public TrainFixture {
 protected:
  using Sets = std::vector<std::string>;

  Config piped(const std::string& family, Sets sets) const {
    sets.insert(sets.begin(), {"run.threads=1", "batch.micro_size=1", "batch.global_size=6", "model.layers=6", "run.steps=2"});
    return config(family, sets);
  }

  /// Of the first step: an update makes of rounding what Adam makes of a small gradient.
  Trace trace_of(const std::string& family, int world, const Sets& layout, const Sets& sets = {}) const {
    Sets all = sets;
    all.insert(all.end(), layout.begin(), layout.end());
    return train(piped(family, all), world, {}, /*recorded_step=*/1);
  }

  void expect_one_device(const std::string& family, int world, const Sets& layout, const Sets& sets = {}) const {
    expect_alike(trace_of(family, world, layout, sets), trace_of(family, 1, {}, sets), layout);
  }

  static void expect_alike(const Trace& many, const Trace& one, const Sets& layout) {
    std::string name;
    for (const auto& set : layout) name += set + " ";
    SCOPED_TRACE(name);
    EXPECT_LT(difference(many.gradients, one.gradients), kGradients);
    for (size_t step = 0; step < one.steps.size(); ++step) {
      EXPECT_NEAR(many.steps[step].loss, one.steps[step].loss, kLosses * one.steps[step].loss);
      EXPECT_NEAR(many.steps[step].grad_norm, one.steps[step].grad_norm, 2e-5 * one.steps[step].grad_norm);
    }
  }
};

}  // namespace tessera::testing_support
