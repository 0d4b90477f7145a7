// Time of an all-reduce between two ranks of this host, as threads: through sockets, and through shared memory. `tessera bench comm` measures processes.
#include <ATen/ATen.h>
#include <benchmark/benchmark.h>

#include "tessera/comm/collectives.h"
#include "tessera/comm/testing.h"

namespace tessera::comm {
namespace {

void all_reduce_of_two_ranks(benchmark::State& state, const std::string& backend) {
  const int64_t bytes = state.range(0);
  run_ranks(2,
            [&](World& world) {
              const auto group = world.group();
              auto tensor = at::zeros({bytes / 4});
              all_reduce(group, tensor);  // connections and pages are warm
              if (world.rank() == 0) {
                for (auto _ : state) all_reduce(group, tensor);
              } else {
                for (benchmark::IterationCount i = 0; i < state.max_iterations; ++i) all_reduce(group, tensor);
              }
            },
            {.backend = backend});
  state.SetBytesProcessed(state.iterations() * bytes);
}

BENCHMARK_CAPTURE(all_reduce_of_two_ranks, gloo, "gloo")->Arg(4 << 10)->Arg(1 << 20)->Arg(16 << 20)->UseRealTime()->Unit(benchmark::kMicrosecond);
BENCHMARK_CAPTURE(all_reduce_of_two_ranks, shm, "shm")->Arg(4 << 10)->Arg(1 << 20)->Arg(16 << 20)->UseRealTime()->Unit(benchmark::kMicrosecond);

}  // namespace
}  // namespace tessera::comm

BENCHMARK_MAIN();
