#include <cstdio>

#include <benchmark/benchmark.h>

#include "tessera/memory/history.h"
#include "tessera/nn/attach.h"
#include "tessera/nn/module.h"

/// What a call costs beyond `forward` itself: idle, and per interceptor. The promise is under 50 ns for an idle call.
namespace {

using namespace tessera::nn;

struct NothingImpl : Module {
  at::Tensor forward(const at::Tensor& x) {
    benchmark::DoNotOptimize(x.unsafeGetTensorImpl());
    return x;
  }
};
TESSERA_MODULE(Nothing);

struct Pass : Interceptor {
  Values call(Module&, Values inputs, const Next& next) override { return next(std::move(inputs)); }
};

void direct(benchmark::State& state) {
  Nothing module;
  const at::Tensor x = at::ones({1});
  for (auto _ : state) benchmark::DoNotOptimize(module->forward(x));
}
BENCHMARK(direct);

void intercepted(benchmark::State& state) {
  Nothing module;
  const at::Tensor x = at::ones({1});
  tessera::Attachment attached;
  for (int64_t i = 0; i < state.range(0); ++i) attached.add(attach(*module, std::make_shared<Pass>()));
  for (auto _ : state) benchmark::DoNotOptimize(module(x));
}
BENCHMARK(intercepted)->ArgName("interceptors")->Arg(0)->Arg(1)->Arg(4);

/// What a place and its label cost where nobody keeps a history.
void labelled(benchmark::State& state) {
  tessera::MemoryTracker tracker;
  for (auto _ : state) {
    const tessera::MemoryLabel label("layers.0");
    const tessera::MemoryScope scope(tessera::MemoryCategory::Activations);
    tessera::mark_memory("forward");
  }
}
BENCHMARK(labelled);

}  // namespace

BENCHMARK_MAIN();
