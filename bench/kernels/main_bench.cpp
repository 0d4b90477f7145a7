#include <algorithm>
#include <chrono>
#include <limits>
#include <vector>

#include "bench/kernels/support.h"
#include "tessera/core/parallel.h"
#include "tessera/memory/host_cache.h"

namespace tessera::bench {

double memory_bandwidth() {
  static const double measured = [] {
    constexpr int64_t count = int64_t{64} << 20;
    std::vector<float> data(count, 1.0f);
    double best = std::numeric_limits<double>::infinity();
    for (int repeat = 0; repeat < 4; ++repeat) {
      const auto start = std::chrono::steady_clock::now();
      parallel_for(0, count, 1 << 16, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) data[i] += 1.0f;
      });
      best = std::min(best, std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
    }
    return 2.0 * count * sizeof(float) / best;
  }();
  return measured;
}

at::Tensor random(at::IntArrayRef shape, at::ScalarType dtype, bool requires_grad) { return at::randn(shape).to(dtype).requires_grad_(requires_grad); }

void report_bytes(benchmark::State& state, double bytes_per_iteration) {
  state.SetBytesProcessed(static_cast<int64_t>(bytes_per_iteration * state.iterations()));
  state.counters["bytes"] = bytes_per_iteration;
  // A rate whose unit is iterations per second, scaled to the share of the bound.
  state.counters["bound"] = benchmark::Counter(bytes_per_iteration * state.iterations() / memory_bandwidth(), benchmark::Counter::kIsRate);
}

namespace {
/// What shares of the bandwidth are taken of, in turns with the kernels: what is updated where it is, and, as STREAM counts it, what is read here and written
/// there (a line that is written is read before, uncounted).
void bandwidth(benchmark::State& state) {
  constexpr int64_t count = int64_t{32} << 20;
  const at::Tensor from = at::zeros({count}), to = state.range(0) != 0 ? from : at::zeros({count});
  const float* const read = from.const_data_ptr<float>();
  float* const written = to.mutable_data_ptr<float>();
  for (auto _ : state) {
    parallel_for(0, count, 1 << 16, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) written[i] = read[i] + 1.0f;
    });
  }
  report_bytes(state, 2.0 * count * sizeof(float));
}
BENCHMARK(bandwidth)->ArgName("in_place")->Arg(0)->Arg(1)->UseRealTime()->Unit(benchmark::kMicrosecond);
}  // namespace

}  // namespace tessera::bench

/// As a run has it: without the cache the page faults of results above 32 MiB cost more than the arithmetic on them, on both sides.
int main(int argc, char** argv) {
  const tessera::CacheHostMemory cached;
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 1;
  benchmark::RunSpecifiedBenchmarks();
  return 0;
}
