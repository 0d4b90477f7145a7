// What DistributedDataParallel costs on two rank-threads over Gloo: a step of a stack of linear layers, by bucket size, beside the same step with its
// gradients reduced one after the other when backward is done, beside a process that reduces nothing, and under each communication hook. `exposed_ms` is the
// communication that backward did not hide, `crossing_MiB` what a step hands to collectives.
#include <atomic>
#include <chrono>

#include <ATen/ATen.h>
#include <benchmark/benchmark.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>

#include "tessera/comm/collectives.h"
#include "tessera/comm/testing.h"
#include "tessera/data_parallel/distributed_data_parallel.h"
#include "tessera/data_parallel/power_sgd.h"
#include "tessera/data_parallel/tree_reduction.h"

namespace tessera {
namespace {

constexpr int ranks = 2;
constexpr int layers = 8;
constexpr int64_t width = 512;
constexpr int64_t rows = 128;

torch::nn::Sequential stack() {
  torch::nn::Sequential model;
  for (int i = 0; i < layers; ++i) model->push_back(torch::nn::Linear(width, width));
  return model;
}

void backward(torch::nn::Sequential& model, const at::Tensor& x) { model->forward(x).square().mean().backward(); }

/// Runs the step on all ranks as long as rank 0's benchmark wants more; `make` gives each rank its step, which returns the exposed seconds.
template <class Make>
void run(benchmark::State& state, Make make) {
  double exposed = 0;
  comm::run_ranks(ranks, [&](comm::World& world) {
    auto step = make(world.group());
    const at::Tensor go = at::ones({1});
    const auto agree = [&](bool mine) {  // all ranks take as many steps as rank 0
      go.fill_(mine ? 1 : 0);
      comm::broadcast(world.group(), go, 0);
      return go.item<float>() > 0;
    };
    step();  // the plan settles
    step();
    if (world.rank() == 0) {
      for (auto _ : state) {
        state.PauseTiming();
        agree(true);
        state.ResumeTiming();
        exposed += step();
      }
      agree(false);
    } else {
      while (agree(true)) step();
    }
  });
  state.counters["exposed_ms"] = benchmark::Counter(1e3 * exposed / static_cast<double>(state.iterations()));
  state.counters["gradient_MiB"] = layers * (width * width + width) * 4.0 / (1 << 20);
}

void without_communication(benchmark::State& state) {
  run(state, [](const comm::Group&) {
    return [model = stack(), x = at::randn({rows, width})]() mutable {
      model->zero_grad();
      backward(model, x);
      return 0.0;
    };
  });
}

void reduce_after_backward(benchmark::State& state) {
  run(state, [](const comm::Group& group) {
    return [group, model = stack(), x = at::randn({rows, width})]() mutable {
      model->zero_grad();
      backward(model, x);
      const auto start = std::chrono::steady_clock::now();
      for (const at::Tensor& parameter : model->parameters()) comm::all_reduce(group, parameter.grad());
      return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    };
  });
}

void ddp(benchmark::State& state) {
  const BucketSizes sizes{.bucket_bytes = state.range(0) << 10, .first_bucket_bytes = std::min<int64_t>(state.range(0) << 10, 1 << 20)};
  run(state, [&](const comm::Group& group) {
    auto model = std::make_shared<torch::nn::Sequential>(stack());
    auto synchronizer = std::make_shared<DistributedDataParallel>(**model, group, DdpOptions{.sizes = sizes, .replicas = ReplicaStart::Broadcast});
    return [model, synchronizer, x = at::randn({rows, width})] {
      synchronizer->begin_step();
      backward(*model, x);
      synchronizer->finish();
      return synchronizer->statistics().exposed.seconds();
    };
  });
}

/// One step of DDP whose buckets `hook` sums.
void ddp_with(benchmark::State& state, const std::function<std::shared_ptr<CommunicationHook>()>& hook) {
  std::atomic<int64_t> bytes = 0;
  run(state, [&](const comm::Group& group) {
    auto model = std::make_shared<torch::nn::Sequential>(stack());
    auto synchronizer = std::make_shared<DistributedDataParallel>(
        **model, group, DdpOptions{.sizes = {.bucket_bytes = 4 << 20}, .replicas = ReplicaStart::Broadcast, .hook = hook()});
    return [model, synchronizer, &bytes, x = at::randn({rows, width})] {
      synchronizer->begin_step();
      backward(*model, x);
      synchronizer->finish();
      bytes = synchronizer->statistics().bytes;
      return synchronizer->statistics().exposed.seconds();
    };
  });
  state.counters["crossing_MiB"] = static_cast<double>(bytes) / (1 << 20);
}

void hook_plain(benchmark::State& state) {
  ddp_with(state, [] { return std::make_shared<AllReduceHook>(); });
}
void hook_bf16(benchmark::State& state) {
  ddp_with(state, [] { return std::make_shared<Bf16Hook>(); });
}
void hook_fp16(benchmark::State& state) {
  ddp_with(state, [] { return std::make_shared<Fp16Hook>(); });
}
void hook_powersgd(benchmark::State& state) {
  ddp_with(state, [&] { return std::make_shared<PowerSgd>(PowerSgdOptions{.rank = state.range(0), .start = 0}); });
}

void tree(benchmark::State& state) {
  run(state, [&](const comm::Group& group) {
    auto model = std::make_shared<torch::nn::Sequential>(stack());
    auto synchronizer = std::make_shared<TreeReduction>(**model, group, TreeReductionOptions{.num_micro_batches = ranks, .replicas = ReplicaStart::Broadcast});
    return [group, model, synchronizer, x = at::randn({rows, width})] {
      const MicroBatchPosition position{.index = group.rank(), .last = true};
      synchronizer->begin_step();
      synchronizer->before_micro_batch(position);
      backward(*model, x);
      synchronizer->after_micro_batch(position);
      synchronizer->finish();
      return synchronizer->statistics().exposed.seconds();
    };
  });
}

BENCHMARK(without_communication)->UseRealTime()->Unit(benchmark::kMillisecond);
BENCHMARK(reduce_after_backward)->UseRealTime()->Unit(benchmark::kMillisecond);
BENCHMARK(ddp)->ArgName("bucket_KiB")->Arg(64)->Arg(1 << 10)->Arg(4 << 10)->Arg(25 << 10)->UseRealTime()->Unit(benchmark::kMillisecond);
BENCHMARK(hook_plain)->UseRealTime()->Unit(benchmark::kMillisecond);
BENCHMARK(hook_bf16)->UseRealTime()->Unit(benchmark::kMillisecond);
BENCHMARK(hook_fp16)->UseRealTime()->Unit(benchmark::kMillisecond);
BENCHMARK(hook_powersgd)->ArgName("rank")->Arg(1)->Arg(4)->UseRealTime()->Unit(benchmark::kMillisecond);
BENCHMARK(tree)->UseRealTime()->Unit(benchmark::kMillisecond);

}  // namespace
}  // namespace tessera

BENCHMARK_MAIN();
