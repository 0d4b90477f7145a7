// Numbers of the counter-based generator a second: what drawing a model's initial weights costs, on one thread.
#include <vector>

#include <benchmark/benchmark.h>

#include "tessera/core/rng.h"

namespace {

void normals(benchmark::State& state) {
  const tessera::CounterRng rng(1, "speed");
  std::vector<float> weights(1 << 20);
  for (auto _ : state) {
    rng.fill_normal(weights.data(), 0, static_cast<int64_t>(weights.size()), 0, 0.02f);
    benchmark::DoNotOptimize(weights.data());
  }
  state.SetItemsProcessed(state.iterations() * static_cast<int64_t>(weights.size()));
}
BENCHMARK(normals);

}  // namespace

BENCHMARK_MAIN();
