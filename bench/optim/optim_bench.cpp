// Optimizer step, norm and clipping on the parameters of a LLaMA of 35 million, as bytes a second: what to hold against the machine's memory bandwidth.
#include <string>

#include <ATen/ops/full.h>
#include <benchmark/benchmark.h>

#include "bench/optim/parameters.h"
#include "tessera/optim/clip.h"
#include "tessera/optim/optimizer.h"

namespace tessera::optim {
namespace {

using bench::count;
using bench::parameters_of_llama;

void step(benchmark::State& state, const char* name, int64_t bytes_per_element, const char* state_dtype = "fp32", double scale = 1) {
  const auto parameters = parameters_of_llama();
  OptimConfig config;
  config.name = name;
  config.momentum = std::string(name) == "adafactor" ? 0 : 0.9;
  config.state_dtype = state_dtype;
  const auto optimizer = make_optimizer(config, parameters, {.looked_up = {"p0"}, .heads = {"p1"}});
  const at::Tensor factor = at::full({}, scale, at::kDouble);
  for (auto _ : state) optimizer->step(1e-4, {}, factor);
  state.SetBytesProcessed(state.iterations() * count(parameters) * bytes_per_element);
}
BENCHMARK_CAPTURE(step, adamw, "adamw", 28)->UseRealTime()->Unit(benchmark::kMillisecond);
BENCHMARK_CAPTURE(step, adamw_clip, "adamw", 28, "fp32", 0.999)->UseRealTime()->Unit(benchmark::kMillisecond);
BENCHMARK_CAPTURE(step, sgd, "sgd", 20)->UseRealTime()->Unit(benchmark::kMillisecond);
BENCHMARK_CAPTURE(step, lion, "lion", 20)->UseRealTime()->Unit(benchmark::kMillisecond);
BENCHMARK_CAPTURE(step, adam8bit, "adam8bit", 22)->UseRealTime()->Unit(benchmark::kMillisecond);
BENCHMARK_CAPTURE(step, adafactor, "adafactor", 28)->UseRealTime()->Unit(benchmark::kMillisecond);
BENCHMARK_CAPTURE(step, muon, "muon", 28)->UseRealTime()->Unit(benchmark::kMillisecond);  // bound by its products
BENCHMARK_CAPTURE(step, adamw_bf16_state, "adamw", 20, "bf16")->UseRealTime()->Unit(benchmark::kMillisecond);
BENCHMARK_CAPTURE(step, lion_bf16_state, "lion", 16, "bf16")->UseRealTime()->Unit(benchmark::kMillisecond);

void norm(benchmark::State& state) {
  const auto parameters = parameters_of_llama();
  for (auto _ : state) benchmark::DoNotOptimize(global_norm(parameters));
  state.SetBytesProcessed(state.iterations() * count(parameters) * 4);
}
BENCHMARK(norm)->UseRealTime()->Unit(benchmark::kMillisecond);

void norm_and_clip(benchmark::State& state) {
  const auto parameters = parameters_of_llama();
  for (auto _ : state) {
    const auto value = global_norm(parameters);
    clip_gradients(parameters, value, value.item<double>() * 0.999);
  }
  state.SetBytesProcessed(state.iterations() * count(parameters) * 12);
}
BENCHMARK(norm_and_clip)->UseRealTime()->Unit(benchmark::kMillisecond);

}  // namespace
}  // namespace tessera::optim
BENCHMARK_MAIN();
