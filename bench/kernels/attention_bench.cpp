#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu_backward_native.h>

#include "bench/kernels/support.h"
#include "tessera/kernels/attention.h"
#include "tessera/kernels/attention_blocks.h"
#include "tessera/kernels/reference.h"

// Causal attention, forward and backward. Arguments: dtype (0 fp32, 1 bf16), batch, tokens, heads, key-value heads, features.
namespace tessera::bench {
namespace {

struct Problem {
  explicit Problem(const benchmark::State& state) {
    const auto make = [&](int64_t heads) {
      return random({state.range(1), state.range(2), heads, state.range(5)}, dtype_of(state.range(0))).transpose(1, 2).detach().requires_grad_(true);
    };
    q = make(state.range(3));
    k = make(state.range(4));
    v = make(state.range(4));
    // Half of the scores are masked: 2 products forward, 5 backward, 2 operations a multiplication.
    flops = 7.0 * static_cast<double>(state.range(1) * state.range(2) * state.range(2) * state.range(3) * state.range(5));
  }
  at::Tensor q, k, v;
  double flops;
};

template <class F>
void measure(benchmark::State& state, const Problem& p, F&& attention) {
  const at::Tensor grad = at::ones_like(p.q);
  for (auto _ : state) {
    attention().backward(grad);
    for (const auto& leaf : {p.q, p.k, p.v}) leaf.mutable_grad() = at::Tensor();
  }
  state.counters["flops"] = benchmark::Counter(p.flops * static_cast<double>(state.iterations()), benchmark::Counter::kIsRate);
}

void attention_eager(benchmark::State& state) {
  const Problem p(state);
  measure(state, p, [&] { return kernels::reference::attention(p.q, p.k, p.v, true); });
}
void attention_flash(benchmark::State& state) {
  const Problem p(state);
  measure(state, p, [&] { return kernels::flash_attention(p.q, p.k, p.v, true); });
}

/// Its gradients alone: ours beside libtorch's kernel, which is what PyTorch has.
template <class F>
void measure_gradients(benchmark::State& state, F&& gradients) {
  const Problem p(state);
  const at::NoGradGuard no_grad;
  const auto [y, log_sum_exp] = at::_scaled_dot_product_flash_attention_for_cpu(p.q, p.k, p.v, 0, true);
  const at::Tensor dy = at::ones_like(y);
  for (auto _ : state) benchmark::DoNotOptimize(gradients(dy, p, y, log_sum_exp));
  state.counters["flops"] = benchmark::Counter(p.flops * 5 / 7 * static_cast<double>(state.iterations()), benchmark::Counter::kIsRate);
}
void attention_gradients_eager(benchmark::State& state) {
  measure_gradients(state, [](const at::Tensor& dy, const Problem& p, const at::Tensor& y, const at::Tensor& log_sum_exp) {
    return at::native::_scaled_dot_product_flash_attention_cpu_backward(dy, p.q, p.k, p.v, y, log_sum_exp, 0, true, {}, {});
  });
}
void attention_gradients_fused(benchmark::State& state) {
  measure_gradients(state, [](const at::Tensor& dy, const Problem& p, const at::Tensor& y, const at::Tensor& log_sum_exp) {
    return kernels::attention_backward_in_blocks(dy, p.q, p.k, p.v, y, log_sum_exp, true, {});
  });
}

void shapes(benchmark::internal::Benchmark* b) {
  b->ArgNames({"bf16", "B", "S", "H", "Hk", "D"})->Unit(benchmark::kMillisecond)->UseRealTime();
  for (const int64_t bf16 : {0, 1}) b->Args({bf16, 8, 256, 6, 6, 64})->Args({bf16, 8, 256, 6, 2, 64})->Args({bf16, 2, 1024, 16, 16, 64});
}

BENCHMARK(attention_eager)->Apply(shapes);
BENCHMARK(attention_flash)->Apply(shapes);
BENCHMARK(attention_gradients_eager)->Apply(shapes);
BENCHMARK(attention_gradients_fused)->Apply(shapes);

}  // namespace
}  // namespace tessera::bench
