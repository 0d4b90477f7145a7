#include "bench/kernels/support.h"
#include "tessera/kernels/attention.h"
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

void shapes(benchmark::internal::Benchmark* b) {
  b->ArgNames({"bf16", "B", "S", "H", "Hk", "D"})->Unit(benchmark::kMillisecond)->UseRealTime();
  for (const int64_t bf16 : {0, 1}) b->Args({bf16, 8, 256, 6, 6, 64})->Args({bf16, 8, 256, 6, 2, 64})->Args({bf16, 2, 1024, 16, 16, 64});
}

BENCHMARK(attention_eager)->Apply(shapes);
BENCHMARK(attention_flash)->Apply(shapes);

}  // namespace
}  // namespace tessera::bench
