// A step of bf16 weights with fp32 masters on the parameters of bench/optim: gradients in bf16, clipped. To be held against an update and a cast of their own.
#include <ATen/ops/full.h>
#include <benchmark/benchmark.h>

#include "bench/optim/parameters.h"
#include "tessera/precision/master_weights.h"

namespace tessera::precision {
namespace {

void step(benchmark::State& state, double scale) {
  const auto parameters = bench::parameters_of_llama(at::kBFloat16);
  const auto optimizer = make_optimizer(OptimConfig(), {.params = at::kBFloat16, .compute = at::kBFloat16}, 0, parameters);
  const at::Tensor factor = at::full({}, scale, at::kDouble);
  for (auto _ : state) optimizer->step(1e-4, {}, factor);
  state.SetBytesProcessed(state.iterations() * bench::count(parameters) * 30);
}
BENCHMARK_CAPTURE(step, masters, 1.0)->UseRealTime()->Unit(benchmark::kMillisecond);
BENCHMARK_CAPTURE(step, masters_clip, 0.999)->UseRealTime()->Unit(benchmark::kMillisecond);

}  // namespace
}  // namespace tessera::precision
BENCHMARK_MAIN();
