#include <cstdio>
#include <string>
#include <utility>
#include <vector>

#include "tessera/core/format.h"
#include "tests/train/held_bytes.h"

/// What a rank keeps per parameter, measured by the tracker between backward and update on ranks that are threads, beside the formulas of docs/memory.md:
/// none w+g+k; stage 1 w+g+k/N; stage 2 w+(g+k)/N; stage 3 (w+g+k)/N. And beside it what no formula of parameters knows of: the buffers at the peak.
namespace {

using namespace tessera;
using Sets = std::vector<std::string>;

void table(const char* title, const Sets& sets) {
  const BytesPerParameter whole = bytes_per_parameter(testing_support::formula_config(sets));
  std::printf("%s: (w, g, k) = (%g, %g, %g) bytes a parameter\n%6s %6s %9s %10s %10s %9s %9s %7s %14s %14s\n", title, whole.weight, whole.gradient, whole.state,
              "stage", "ranks", "weights", "gradients", "optimizer", "total", "formula", "off", "buffers", "peak");
  for (const int ranks : {2, 4, 8}) {
    for (const int stage : {0, 1, 2, 3}) {
      Sets all = sets;
      all.push_back("zero.stage=" + std::to_string(stage));
      const auto measured = testing_support::held_bytes(testing_support::formula_config(all), ranks);
      const auto state = measured.state();
      const double formula = kept_per_parameter(whole, stage, ranks).total();
      std::printf("%6d %6d %9.3f %10.3f %10.3f %9.3f %9.3f %+6.2f%% %14s %14s\n", stage, ranks, state.weight, state.gradient, state.state, state.total(),
                  formula, 100 * (state.total() / formula - 1), format_bytes(measured.buffers_at_peak()).c_str(),
                  format_bytes(total_of(measured.peak)).c_str());
    }
  }
}

}  // namespace

int main() {
  table("fp32", {});
  table("bf16 with fp32 masters and fp32 gradients", {"precision.params=bf16", "precision.compute=bf16"});
  table("the same with bf16 gradients", {"precision.params=bf16", "precision.compute=bf16", "precision.reduce=bf16"});
  table("fp32 shards, cast at the gather or at each use", {"precision.compute=bf16"});
}
