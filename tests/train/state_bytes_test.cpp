#include "tessera/train/state_bytes.h"

#include <gtest/gtest.h>

#include "tests/train/held_bytes.h"

namespace tessera {
namespace {

using Sets = std::vector<std::string>;

TEST(StateBytes, FollowFromPrecisionAndOptimizer) {
  struct Case {
    Sets sets;
    double weight, gradient, state;
  };
  const Sets bf16{"precision.params=bf16", "precision.compute=bf16"};
  const auto with = [&](const std::string& more) {
    Sets all = bf16;
    all.push_back(more);
    return all;
  };
  for (const auto& [sets, weight, gradient, state] : std::vector<Case>{{{}, 4, 4, 8},
                                                                       {{"precision.compute=bf16"}, 4, 4, 8},
                                                                       {{"optim.name=sgd"}, 4, 4, 0},
                                                                       {{"optim.name=sgd", "optim.momentum=0.9"}, 4, 4, 4},
                                                                       {{"optim.name=muon"}, 4, 4, 4},
                                                                       {{"optim.state_dtype=bf16"}, 4, 4, 4},
                                                                       {{"optim.name=lion", "optim.state_dtype=bf16"}, 4, 4, 2},
                                                                       {with("optim.state_dtype=bf16"), 2, 4, 8},
                                                                       {bf16, 2, 4, 12},
                                                                       {with("precision.reduce=bf16"), 2, 2, 12},
                                                                       {with("precision.master=bf16"), 2, 4, 4}}) {
    const auto bytes = bytes_per_parameter(testing_support::formula_config(sets));
    EXPECT_EQ(bytes.weight, weight) << ::testing::PrintToString(sets);
    EXPECT_EQ(bytes.gradient, gradient) << ::testing::PrintToString(sets);
    EXPECT_EQ(bytes.state, state) << ::testing::PrintToString(sets);
  }
}

TEST(StateBytes, AreDividedByStage) {
  const BytesPerParameter zero_paper{.weight = 2, .gradient = 2, .state = 12};
  for (const int n : {1, 2, 3, 5, 8}) {
    EXPECT_DOUBLE_EQ(kept_per_parameter(zero_paper, 0, n).total(), 16);
    EXPECT_DOUBLE_EQ(kept_per_parameter(zero_paper, 1, n).total(), 4 + 12.0 / n);
    EXPECT_DOUBLE_EQ(kept_per_parameter(zero_paper, 2, n).total(), 2 + 14.0 / n);
    EXPECT_DOUBLE_EQ(kept_per_parameter(zero_paper, 3, n).total(), 16.0 / n);
  }
}

TEST(StateBytes, AreWhatTheTrackerMeasures) {
  const Sets masters{"precision.params=bf16", "precision.compute=bf16"};
  for (const auto& [sets, ranks] : std::vector<std::pair<Sets, int>>{{{}, 2}, {{}, 8}, {masters, 4}, {{"optim.state_dtype=bf16"}, 3}}) {
    for (const int stage : {0, 1, 2, 3}) {
      Sets all = sets;
      all.push_back("zero.stage=" + std::to_string(stage));
      const Config config = testing_support::formula_config(all);
      const auto expected = kept_per_parameter(bytes_per_parameter(config), stage, ranks), measured = testing_support::held_bytes(config, ranks).state();
      EXPECT_NEAR(measured.weight, expected.weight, 0.01 * expected.total()) << "stage " << stage << ", " << ranks << " ranks";
      EXPECT_NEAR(measured.gradient, expected.gradient, 0.01 * expected.total()) << "stage " << stage << ", " << ranks << " ranks";
      EXPECT_NEAR(measured.state, expected.state, 0.01 * expected.total()) << "stage " << stage << ", " << ranks << " ranks";
      EXPECT_NEAR(measured.total(), expected.total(), 0.01 * expected.total()) << "stage " << stage << ", " << ranks << " ranks";
    }
  }
}

}  // namespace
}  // namespace tessera
