// What recompute costs and saves: forward and backward of two sequences through the model of recipes/bench_matmul.toml, on one thread. A pass with recompute
// alternates with one without. `time_more` (processor time, least of all passes) is to be at most `flops_more` and 5 points; `points` is their difference.
// `kept_less`: how many times fewer bytes of activations are alive between forward and backward; `peak_MiB`: the most that is alive from there on, but for
// parameters and their gradients.
#include <algorithm>
#include <ctime>
#include <limits>
#include <memory>
#include <optional>
#include <string>

#include <ATen/Parallel.h>
#include <ATen/ops/randint.h>
#include <benchmark/benchmark.h>

#include "tessera/config/config.h"
#include "tessera/memory/host_cache.h"
#include "tessera/memory/memory.h"
#include "tessera/models/model.h"
#include "tessera/nn/meta.h"
#include "tessera/nn/operators.h"
#include "tessera/precision/policy.h"
#include "tessera/recompute/recompute.h"

namespace tessera {
namespace {

constexpr int64_t kRows = 2, kSequence = 256, kVocabulary = 4096;

std::shared_ptr<LanguageModel> make(at::ScalarType compute) {
  Config config =
      parse_config("[model]\nfamily = \"llama\"\ndim = 1024\nlayers = 8\nheads = 16\nffn_dim = 2752\nvocab_size = 4096\nmax_seq_len = 256\n", ".", {});
  resolve(config);
  auto model = on_meta([&] { return make_model(config.model); });
  if (compute != at::kFloat) precision::apply(*model, {.compute = compute});
  materialize(*model, 1);
  for (const auto& p : model->parameters()) p.mutable_grad() = at::zeros_like(p);
  return model;
}

double thread_seconds() {
  timespec now{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

/// Passes of one kind.
struct Passes {
  double seconds = std::numeric_limits<double>::infinity();  ///< of the quickest
  double flops = 0;
  int64_t kept = 0, peak = 0;

  double run(LanguageModel& model, const at::Tensor& tokens) {
    MemoryTracker tracker;
    const TrackMemory tracking(tracker);
    const MemoryScope activations(MemoryCategory::Activations);  // what the head keeps is the gradients of its fused loss: outputs
    const double begin = thread_seconds();
    const at::Tensor loss = model.loss_sum(tokens, tokens);
    kept = tracker.current(MemoryCategory::Activations);
    tracker.reset_peak();
    loss.backward();
    const double passed = thread_seconds() - begin;
    peak = tracker.peak();
    seconds = std::min(seconds, passed);
    return passed;
  }

  void count_flops(LanguageModel& model, const at::Tensor& tokens) {
    const auto counter = std::make_shared<nn::FlopCounter>();
    const nn::OperatorScope counted(counter);
    run(model, tokens);
    flops = counter->flops();
    seconds = std::numeric_limits<double>::infinity();  // that was the warm-up
  }
};

void forward_backward(benchmark::State& state, at::ScalarType compute, const RecomputeOptions& options) {
  at::set_num_threads(1);
  const CacheHostMemory cache;
  const auto model = make(compute);
  const at::Tensor tokens = at::randint(kVocabulary, {kRows, kSequence}, at::kLong);
  Passes plain, again;
  plain.count_flops(*model, tokens);
  {
    const auto attached = recompute(*model, options);
    again.count_flops(*model, tokens);
  }
  for (auto _ : state) {
    plain.run(*model, tokens);
    const auto attached = recompute(*model, options);
    state.SetIterationTime(again.run(*model, tokens));
  }
  const double time_more = again.seconds / plain.seconds - 1, flops_more = again.flops / plain.flops - 1;
  state.counters["quickest_ms"] = 1e3 * again.seconds;
  state.counters["time_more"] = time_more;
  state.counters["flops_more"] = flops_more;
  state.counters["points"] = 100 * (time_more - flops_more);
  state.counters["kept_less"] = static_cast<double>(plain.kept) / static_cast<double>(again.kept);
  state.counters["kept_MiB"] = static_cast<double>(again.kept) / (1 << 20);
  state.counters["peak_MiB"] = static_cast<double>(again.peak) / (1 << 20);
  state.counters["peak_less"] = static_cast<double>(plain.peak) / static_cast<double>(again.peak);
}

#define RECOMPUTE_BENCHMARK(name, passes, compute, ...) \
  BENCHMARK_CAPTURE(forward_backward, name, compute, RecomputeOptions __VA_ARGS__)->UseManualTime()->Iterations(passes)->Unit(benchmark::kMillisecond)

RECOMPUTE_BENCHMARK(fp32_full, 6, at::kFloat, {});
RECOMPUTE_BENCHMARK(bf16_full, 8, at::kBFloat16, {});
RECOMPUTE_BENCHMARK(bf16_full_every_2nd, 3, at::kBFloat16, {.every = 2});
RECOMPUTE_BENCHMARK(bf16_selective_cores, 3, at::kBFloat16, {.mode = RecomputeMode::Selective});
RECOMPUTE_BENCHMARK(bf16_selective_keep_mm, 3, at::kBFloat16, {.mode = RecomputeMode::Selective, .keep = {"mm"}});

}  // namespace
}  // namespace tessera

BENCHMARK_MAIN();
