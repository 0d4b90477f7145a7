// What stage 3 costs on two rank-threads: a small operator by itself and watched by the hook that serves unmodified modules, and a step of a stack of linear
// layers, alone, with its gathers made by calls and by operators, ahead of time and not. `exposed_ms` is the communication that was waited for.
#include <ATen/ATen.h>
#include <benchmark/benchmark.h>
#include <torch/nn/modules/linear.h>

#include "tessera/comm/collectives.h"
#include "tessera/comm/testing.h"
#include "tessera/fsdp/fully_shard.h"
#include "tessera/nn/linear.h"
#include "tessera/nn/module.h"

namespace tessera {
namespace {

constexpr int kRanks = 2, kLayers = 8, kOperators = 1000;
constexpr int64_t kWidth = 512, kRows = 128;

/// Each operator has a parameter among its arguments, so that the hook has all of its work.
struct ManyOperators : torch::nn::Module {
  ManyOperators() { weight = register_parameter("weight", at::full({8}, 0.5)); }
  at::Tensor forward(at::Tensor x) {
    for (int i = 0; i < kOperators; ++i) x = x * weight;
    return x;
  }
  at::Tensor weight;
};

template <class Base, class Linear>
struct StackOf : Base {
  StackOf() {
    for (int i = 0; i < kLayers; ++i) {
      layers.emplace_back(kWidth, kWidth);
      this->register_module("layer" + std::to_string(i), layers.back());
    }
  }
  at::Tensor forward(at::Tensor x) {
    for (Linear& layer : layers) x = at::relu(layer(x));
    return x;
  }
  std::vector<Linear> layers;
};
using PlainStack = StackOf<torch::nn::Module, torch::nn::Linear>;
using OurStackImpl = StackOf<nn::Module, nn::Linear>;
TESSERA_MODULE(OurStack);

/// Runs what `make` gives each rank for as long as rank 0's benchmark wants more; returns rank 0's sum of what it returned.
template <class Make>
double run(benchmark::State& state, Make make) {
  double sum = 0;
  comm::run_ranks(kRanks, [&](comm::World& world) {
    auto step = make(world.group());
    const at::Tensor go = at::ones({1});
    const auto agree = [&](bool mine) {
      go.fill_(mine ? 1 : 0);
      comm::broadcast(world.group(), go, 0);
      return go.item<float>() > 0;
    };
    step();  // the order settles
    step();
    if (world.rank() > 0) {
      while (agree(true)) step();
      return;
    }
    for (auto _ : state) {
      state.PauseTiming();
      agree(true);
      state.ResumeTiming();
      sum += step();
    }
    agree(false);
  });
  return sum;
}

void operators(benchmark::State& state) {
  const bool watched = state.range(0) != 0;
  run(state, [&](const comm::Group& group) {
    const auto model = std::make_shared<ManyOperators>();
    std::shared_ptr<FullyShardedDataParallel> sharded;
    if (watched) sharded = fully_shard(*model, group, {.replicas = ReplicaStart::Broadcast, .trigger = ShardTrigger::Operators});
    return [model, sharded, x = at::ones({8})] {
      const at::NoGradGuard no_grad;
      model->forward(x);
      return 0.0;
    };
  });
  state.counters["ns_an_operator"] = benchmark::Counter(kOperators * 1e-9, benchmark::Counter::kIsIterationInvariantRate | benchmark::Counter::kInvert);
}

void finish(benchmark::State& state, double exposed) {
  state.counters["exposed_ms"] = benchmark::Counter(1e3 * exposed / static_cast<double>(state.iterations()));
}

void alone(benchmark::State& state) {
  run(state, [](const comm::Group&) {
    OurStack model;
    return [model, x = at::randn({kRows, kWidth})]() mutable {
      model->zero_grad();
      model(x).square().mean().backward();
      return 0.0;
    };
  });
}

template <class Forward>
auto sharded_step(const std::shared_ptr<torch::nn::Module>& model, const comm::Group& group, FullyShardOptions options, Forward forward) {
  options.wrap = "layer*";
  options.replicas = ReplicaStart::Broadcast;
  const std::shared_ptr<FullyShardedDataParallel> sharded = fully_shard(*model, group, std::move(options));
  return [model, sharded, forward, x = at::randn({kRows, kWidth})]() mutable {
    sharded->begin_step();
    forward(x).square().mean().backward();
    sharded->finish();
    return sharded->statistics().exposed.seconds();
  };
}

void by_calls(benchmark::State& state) {
  const int64_t ahead = state.range(0);
  finish(state, run(state, [&](const comm::Group& group) {
           OurStack model;
           return sharded_step(model.ptr(), group, {.prefetch = {.units = ahead}}, [model](const at::Tensor& x) mutable { return model(x); });
         }));
}

void by_operators(benchmark::State& state) {
  finish(state, run(state, [&](const comm::Group& group) {
           const auto model = std::make_shared<PlainStack>();
           return sharded_step(model, group, {}, [model](const at::Tensor& x) { return model->forward(x); });
         }));
}

BENCHMARK(operators)->ArgName("watched")->Arg(0)->Arg(1)->UseRealTime()->Unit(benchmark::kMicrosecond);
BENCHMARK(alone)->UseRealTime()->Unit(benchmark::kMillisecond);
BENCHMARK(by_calls)->ArgName("prefetch")->Arg(0)->Arg(1)->UseRealTime()->Unit(benchmark::kMillisecond);
BENCHMARK(by_operators)->UseRealTime()->Unit(benchmark::kMillisecond);

}  // namespace
}  // namespace tessera

BENCHMARK_MAIN();
