#pragma once

#include "tests/train/fixture.h"

namespace tessera::testing_support {

/// Runs of a mixture in some layout, beside one device.
class MixtureFixture : public TrainFixture {
 protected:
  /// `model` is of both runs and comes behind `base`; `layout` of the other alone, on `world` ranks.
  void expect_same_run(const std::vector<std::string>& base, const std::vector<std::string>& model, const std::vector<std::string>& layout, int world) const {
    SCOPED_TRACE(::testing::PrintToString(model) + " " + ::testing::PrintToString(layout) + " on " + std::to_string(world));
    std::vector<std::string> sets = base;
    sets.insert(sets.end(), model.begin(), model.end());
    const Trace want = train(config("mixtral", sets), 1);
    sets.insert(sets.end(), layout.begin(), layout.end());
    const Trace got = train(config("mixtral", sets), world);
    expect_same_trace(got, want);
  }

  static void expect_same_trace(const Trace& got, const Trace& want) {
    EXPECT_LE(difference(got.gradients, want.gradients), kGradients);
    ASSERT_EQ(got.steps.size(), want.steps.size());
    for (size_t i = 0; i < got.steps.size(); ++i) {
      EXPECT_NEAR(got.steps[i].loss, want.steps[i].loss, kLosses * want.steps[i].loss) << "step " << i + 1;
      EXPECT_NEAR(got.steps[i].grad_norm, want.steps[i].grad_norm, 1e-5 * want.steps[i].grad_norm) << "step " << i + 1;
      ASSERT_EQ(got.steps[i].experts.size(), want.steps[i].experts.size());
      ASSERT_GE(got.steps[i].experts.size(), 2U);
      for (size_t layer = 0; layer < got.steps[i].experts.size(); ++layer) {
        EXPECT_EQ(got.steps[i].experts[layer].share, want.steps[i].experts[layer].share) << "step " << i + 1 << ", layer " << layer;
        EXPECT_EQ(got.steps[i].experts[layer].dropped, want.steps[i].experts[layer].dropped) << "step " << i + 1 << ", layer " << layer;
        EXPECT_NEAR(got.steps[i].experts[layer].balance, want.steps[i].experts[layer].balance, 1e-5);
        EXPECT_NEAR(got.steps[i].experts[layer].z, want.steps[i].experts[layer].z, 1e-4 * want.steps[i].experts[layer].z);
      }
    }
  }
};

}  // namespace tessera::testing_support
