// Bytes that a rank keeps of each parameter, by stage and precision: measured between backward and update of a run, beside the formulas.

#include <cstdio>

#include <gtest/gtest.h>

#include "tests/train/held_bytes.h"

namespace tessera {
namespace {

struct Setting {
  const char* name;
  std::vector<std::string> sets;
};

class ShardedMemory : public ::testing::TestWithParam<Setting> {};

TEST_P(ShardedMemory, IsThatOfTheFormulas) {
  const auto config = [&](int stage) {
    auto sets = GetParam().sets;
    sets.push_back("zero.stage=" + std::to_string(stage));
    return testing_support::formula_config(sets);
  };
  const BytesPerParameter whole = bytes_per_parameter(config(0));
  std::printf("bytes a parameter on each rank, %s, AdamW: (w, g, k) = (%g, %g, %g)\n%6s %6s %9s %10s %10s %8s %9s\n", GetParam().name, whole.weight,
              whole.gradient, whole.state, "stage", "ranks", "weights", "gradients", "optimizer", "total", "formula");
  for (const int stage : {0, 1, 2, 3}) {
    for (const int ranks : {2, 4, 8}) {
      if (stage == 0 && ranks > 2) continue;  // whole on each, however many there are
      const BytesPerParameter held = testing_support::held_bytes(config(stage), ranks).state(), formula = kept_per_parameter(whole, stage, ranks);
      std::printf("%6d %6d %9.3f %10.3f %10.3f %8.3f %9.3f\n", stage, ranks, held.weight, held.gradient, held.state, held.total(), formula.total());
      const auto expect_near = [&](double got, double want, const char* what) {
        EXPECT_NEAR(got, want, 0.01 * formula.total()) << what << " of stage " << stage << " on " << ranks << " ranks";
      };
      expect_near(held.weight, formula.weight, "weights");
      expect_near(held.gradient, formula.gradient, "gradients");
      expect_near(held.state, formula.state, "optimizer state");
      expect_near(held.total(), formula.total(), "all");
    }
  }
}

INSTANTIATE_TEST_SUITE_P(
    Sets, ShardedMemory,
    ::testing::Values(Setting{"Fp32", {}}, Setting{"CastAtGather", {"precision.compute=bf16", "precision.reduce=bf16"}},
                      Setting{"Masters", {"precision.params=bf16", "precision.compute=bf16"}},
                      Setting{"OfZerosPaper", {"precision.params=bf16", "precision.compute=bf16", "precision.reduce=bf16"}},
                      Setting{"Fp16", {"precision.params=fp16", "precision.compute=fp16", "precision.reduce=fp16", "precision.loss_scale=dynamic"}},
                      Setting{"PureBf16", {"precision.params=bf16", "precision.compute=bf16", "precision.reduce=bf16", "precision.master=bf16"}}),
    [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace tessera
