#include "bench/kernels/support.h"
#include "tessera/kernels/adamw.h"
#include "tessera/kernels/cpu/loops.h"
#include "tessera/kernels/quantized_linear.h"

// What is read and written element by element: AdamW on the host, and frozen weights brought back from 8 or 4 bits. "eager" is what they are held against:
// libtorch's fused operator and a pass each for what is fused here; of codes the loop without vectors of this machine.
namespace tessera::bench {
namespace {

struct Moments {
  explicit Moments(int64_t n)
      : parameter(at::randn({n})), gradient(at::randn({n})), exp_avg(at::zeros({n})), exp_avg_sq(at::ones({n})), copy(parameter.to(at::kBFloat16)) {}
  at::Tensor parameter, gradient, exp_avg, exp_avg_sq, copy, steps = at::full({}, 3.0f);

  void libtorch() const {
    at::_fused_adamw_({parameter}, {gradient}, {exp_avg}, {exp_avg_sq}, {}, {steps}, 1e-6, 0.9, 0.999, 0.01, 1e-8, /*amsgrad=*/false, /*maximize=*/false);
  }
  void ours(double scale, const at::Tensor& rounded = {}) const {
    kernels::adamw_(parameter, gradient, exp_avg, exp_avg_sq, {.lr = 1e-6, .weight_decay = 0.01, .step = 3, .gradient_scale = scale}, rounded);
  }
};

/// `bytes` of an element.
template <class F>
void measure_update(benchmark::State& state, int64_t bytes, F&& update) {
  const Moments moments(state.range(0));
  for (auto _ : state) update(moments);
  report_bytes(state, static_cast<double>(bytes * state.range(0)));
}

void adamw_fused(benchmark::State& state) {
  measure_update(state, 28, [](const Moments& m) { m.ours(1); });
}
void adamw_eager(benchmark::State& state) {
  measure_update(state, 28, [](const Moments& m) { m.libtorch(); });
}
void adamw_copy_fused(benchmark::State& state) {
  measure_update(state, 32, [](const Moments& m) { m.ours(1, m.copy); });
}
void adamw_copy_eager(benchmark::State& state) {
  measure_update(state, 32, [](const Moments& m) {
    m.libtorch();
    m.copy.copy_(m.parameter);
  });
}
void adamw_clip_fused(benchmark::State& state) {
  measure_update(state, 28, [](const Moments& m) { m.ours(0.9999); });
}
void adamw_clip_eager(benchmark::State& state) {
  measure_update(state, 28, [](const Moments& m) {
    m.gradient.mul_(0.9999);
    m.libtorch();
  });
}

void elements(benchmark::internal::Benchmark* b) { b->ArgNames({"elements"})->Unit(benchmark::kMillisecond)->UseRealTime()->Arg(int64_t{1} << 25); }
BENCHMARK(adamw_eager)->Apply(elements);
BENCHMARK(adamw_fused)->Apply(elements);
BENCHMARK(adamw_copy_eager)->Apply(elements);
BENCHMARK(adamw_copy_fused)->Apply(elements);
BENCHMARK(adamw_clip_eager)->Apply(elements);
BENCHMARK(adamw_clip_fused)->Apply(elements);

/// Tiles of a weight [4096, 4096], one after the other, as a product takes them.
kernels::QuantizedMatrix codes(int64_t is_nf4) {
  const at::Tensor whole = at::randn({4096, 4096});
  const kernels::QuantizeForm form{.format = is_nf4 != 0 ? kernels::WeightFormat::Nf4 : kernels::WeightFormat::Int8};
  return kernels::quantize(whole, form, {.rows = 4096, .columns = 4096, .whole_columns = 4096}, at::kCPU);
}
constexpr int64_t kRows = 256;

void dequantize_fused(benchmark::State& state) {
  const auto matrix = codes(state.range(1));
  for (auto _ : state) {
    for (int64_t row = 0; row < 4096; row += kRows) benchmark::DoNotOptimize(kernels::dequantize(matrix, row, kRows, dtype_of(state.range(0))));
  }
  report_bytes(state, static_cast<double>(matrix.bytes()) + 4096.0 * 4096 * static_cast<double>(c10::elementSize(dtype_of(state.range(0)))));
}
void dequantize_eager(benchmark::State& state) {
  const auto matrix = codes(state.range(1));
  const at::Tensor tile = at::empty({kRows, 4096}, dtype_of(state.range(0)));
  const int64_t width = matrix.codes.size(1);
  for (auto _ : state) {
    for (int64_t row = 0; row < 4096; ++row) {
      kernels::cpu::loops_baseline()->dequantize({.codes = static_cast<const uint8_t*>(matrix.codes.const_data_ptr()) + row * width,
                                                  .is_nf4 = state.range(1) != 0,
                                                  .numbers = kernels::nf4_numbers().data(),
                                                  .scales = matrix.scales.const_data_ptr<float>() + row * matrix.scales.size(1),
                                                  .offset = 0,
                                                  .block = 64,
                                                  .columns = 4096,
                                                  .out = {static_cast<char*>(tile.data_ptr()) + row % kRows * 4096 * tile.element_size(),
                                                          state.range(0) == 0 ? kernels::cpu::Type::Float : kernels::cpu::Type::BFloat16}});
    }
  }
}
void formats(benchmark::internal::Benchmark* b) {
  b->ArgNames({"bf16", "nf4"})->Unit(benchmark::kMicrosecond)->UseRealTime();
  for (const int64_t bf16 : {0, 1}) b->Args({bf16, 0})->Args({bf16, 1});
}
BENCHMARK(dequantize_eager)->Apply(formats);
BENCHMARK(dequantize_fused)->Apply(formats);

}  // namespace
}  // namespace tessera::bench
